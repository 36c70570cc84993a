"""Jobs with spare hosts: at a restart, they take the places of the hosts that no longer answer ssh."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from unitrain.commands.launchers import launcher_options
from unitrain.commands.toolchain import run_to_end
from unitrain.errors import LaunchError, UsageError
from unitrain.job.starting import supervisor
from unitrain.launch.allocation import Host
from unitrain.launch.network.addresses import is_here
from unitrain.process import print_stderr

# How the launchers open a session. Not through a connection that the user's ssh shares: its host may have been lost.
_SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ControlPath=none"]
_SSH += ["-o", "ConnectTimeout=5", "-o", "ConnectionAttempts=2"]
_OPTIONS: dict[str, list[str]] = {"mpirun": [], "horovodrun": ["-o", "StrictHostKeyChecking=no"]}
_ANSWER_S = 30.0


def check_spare(launcher: str, hosts: Sequence[Host], spare: int, max_restarts: int) -> None:
    """Raise UsageError if ``run_with_spare`` can't run a job with these arguments."""
    if not spare:
        raise UsageError("--max-restarts needs --spare. On the same hosts: unitrain run --max-restarts N -- COMMAND.")
    if launcher not in _OPTIONS:
        raise UsageError(
            f"--spare needs --launcher {' or '.join(_OPTIONS)}; {launcher} has its own way to leave hosts out: see "
            '"Restarting at another size" on the page on reliability.'
        )
    if not 0 < spare < len(hosts):
        raise UsageError(f"--spare is {spare}, but must be at least 1, and less than the {len(hosts)} hosts.")
    if max_restarts < 1:
        raise UsageError("--spare needs --max-restarts N, at least 1: a spare host is taken when the job is restarted.")


def run_with_spare(launcher: str, hosts: Sequence[Host], spare: int, script: Sequence[str], max_restarts: int) -> int:
    """Run a job on all hosts but the last ``spare``, as ``unitrain run`` does, and return its exit code."""
    names = [f"{host.name}:{host.processes}" for host in hosts]
    return supervisor.run([launcher, str(spare), *names, "--", *script], max_restarts=max_restarts, module=__name__)


def supervise(parent: int, max_restarts: int, words: Sequence[str]) -> int:
    """Do the supervisor's part of ``run_with_spare``, in its process."""
    launcher, spare, *names = words[: words.index("--")]
    hosts = [Host(name, int(processes)) for name, _, processes in (one.partition(":") for one in names)]
    job = _Job(launcher, hosts[: -int(spare)], hosts[-int(spare) :], words[words.index("--") + 1 :])
    return supervisor.supervise(parent, max_restarts, job.command, lambda: bool(job.failures(job.hosts)))


class _Job:
    def __init__(self, launcher: str, hosts: list[Host], spare: list[Host], script: Sequence[str]) -> None:
        self.hosts = hosts
        self._launcher, self._spare, self._script = launcher, spare, script

    def command(self) -> list[str]:
        """Return the command for hosts that answer. Raises LaunchError if there are too few."""
        failures = self.failures([*self.hosts, *self._spare])
        for place, lost in enumerate(self.hosts):
            if lost.name not in failures:
                continue
            found = next((host for host in self._spare if host.name not in failures), None)
            if found is None:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
                raise LaunchError(
                    f"{lost.name} does not answer ssh, nor does any spare host ({reasons}). Repair one, or name others "
                    "in --hosts, and start the job again: it continues from its newest checkpoint."
                )
            _print(f"{lost.name} does not answer ssh ({failures.pop(lost.name)}): {found.name} takes its place.")
            self.hosts[place] = found
            self._spare.remove(found)
            self._spare.append(lost)  # it may be back when another is lost
        for name, reason in failures.items():
            _print(f"the spare host {name} does not answer ssh ({reason}): it can't replace another now.")
        return [*launcher_options(self._launcher, self.hosts, 0)[0], *self._script]

    def failures(self, hosts: Sequence[Host]) -> dict[str, str]:
        """Return the names of the hosts that can't be reached with ssh, each with the reason."""

        def failure(name: str) -> str:
            code, output = run_to_end(*_SSH, *_OPTIONS[self._launcher], name, "true", timeout_s=_ANSWER_S)
            return (output.strip() or f"exit code {code}").splitlines()[-1].strip() if code else ""

        others = [host.name for host in hosts if not is_here(host.name)]
        with ThreadPoolExecutor(len(others) or 1) as pool:
            return {name: reason for name, reason in zip(others, pool.map(failure, others), strict=True) if reason}


def _print(line: str) -> None:
    print_stderr(f"unitrain launch: {line}")
