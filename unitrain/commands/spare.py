"""Jobs with spare hosts: at a restart, they take the places of the hosts that no longer answer ssh."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from unitrain.errors import LaunchError
from unitrain.job.starting import supervisor
from unitrain.launch.allocation import Host
from unitrain.launch.local.launchers import launcher_options
from unitrain.launch.local.toolchain import run_to_end
from unitrain.launch.network.addresses import is_here
from unitrain.process import print_stderr

# A new session, as the launchers open: one that the user's ssh shares may be to a host that has gone since.
_OPTIONS = ["BatchMode=yes", "ControlPath=none", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"]
_SSH = ["ssh", *(f"-o{option}" for option in [*_OPTIONS, "ConnectTimeout=5", "ConnectionAttempts=2"])]


def run_with_spare(launcher: str, hosts: Sequence[Host], spare: int, script: Sequence[str], max_restarts: int) -> int:
    """Run a job on all hosts but the last ``spare``, as ``unitrain run`` does, and return its exit code."""
    job = [launcher, len(hosts) - spare, [(host.name, host.processes) for host in hosts], script]
    return supervisor.run([json.dumps(job)], max_restarts=max_restarts, module=__name__)


def supervise(parent: int, max_restarts: int, words: Sequence[str]) -> int:
    """Do the supervisor's part of ``run_with_spare``, in its process."""
    launcher, used, listed, script = json.loads(words[0])
    hosts = [Host(*one) for one in listed]
    for name, reason in _failures(hosts[used:]).items():
        print_stderr(f"unitrain launch: the spare host {name} does not answer ssh ({reason}).")

    def command() -> list[str]:
        failures = _failures(hosts)
        for place in [at for at in range(used) if hosts[at].name in failures]:
            spare = next((at for at in range(used, len(hosts)) if hosts[at].name not in failures), None)
            said = f"{hosts[place].name} does not answer ssh ({failures[hosts[place].name]})"
            if spare is None:
                raise LaunchError(f"{said}, and no spare host does: repair one, and start the job again to continue.")
            print_stderr(f"unitrain launch: {said}: {hosts[spare].name} takes its place.")
            hosts[place], hosts[spare] = hosts[spare], hosts[place]  # the lost one may come back
        return [*launcher_options(launcher, hosts[:used], 0)[0], *script]

    return supervisor.supervise(parent, max_restarts, command)


def _failures(hosts: Sequence[Host]) -> dict[str, str]:
    """Return the names of the hosts that can't be reached with ssh, each with the reason."""
    others = [host.name for host in hosts if not is_here(host.name)]
    with ThreadPoolExecutor(len(others) or 1) as pool:
        answers = pool.map(lambda name: run_to_end(*_SSH, name, "true", timeout_s=30), others)
        ended = zip(others, answers, strict=True)
        return {name: said.strip().split("\n")[-1] or f"exit code {code}" for name, (code, said) in ended if code}
