"""A real SLURM cluster on this machine, for tests with ``srun``: munged, slurmctld, slurmd.

It needs no root, no fixed port and nothing outside its folder, so that several can run at once. Its two nodes are both
this host, and have more CPUs than it.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from free_ports import free_ports

DAEMONS = ("munged", "slurmctld", "slurmd")
START_S = 60.0
MOST_FIRST_JOB = 60_000_000  # SLURM's ids end at 67 million

# The ranks of a step meet at a port that follows from the id of the job: with FirstJobId, jobs of two clusters on this
# machine have different ones. The backfill scheduler, which alone starts heterogeneous jobs, runs every 30 s otherwise.
# Nodes are named by addresses because nothing else has their names looked up, and ranks on two nodes meet at the
# first one's name.
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1
FirstJobId={first_job}
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports} CPUs=64
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=abrupt Nodes=ALL PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=off
"""
NODES = ("127.0.0.1", "127.0.0.2")


@dataclass(frozen=True)
class Slurm:
    """A running SLURM: ``subprocess.run([*slurm.srun, "-n", "2", ...], env=slurm.env)``."""

    srun: tuple[str, ...]
    env: dict[str, str]
    _nodes: dict[str, subprocess.Popen[bytes]]

    def call(self, *command: str) -> str:
        """Run one of SLURM's programs, and return what it prints."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.strip()

    def lose(self, node: str) -> None:
        """Kill everything on a node, and have SLURM know it, as its health checks would after a while."""
        tasks = [process for process in psutil.process_iter() if self._is_on(process, node)]
        for process in [*(above for task in tasks for above in task.parents()), *tasks]:
            with suppress(psutil.NoSuchProcess):
                if process in tasks or process.name() == "slurmstepd":
                    process.kill()
        self._nodes[node].kill()
        self._nodes[node].wait()
        self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def _is_on(self, process: psutil.Process, node: str) -> bool:
        try:
            environ = process.environ()
        except (psutil.Error, OSError):
            return False
        return (environ.get("SLURMD_NODENAME"), environ.get("SLURM_CONF")) == (node, self.env["SLURM_CONF"])


def slurm_missing() -> str | None:
    """Return why SLURM can't be started here, or None."""
    missing = [program for program in (*DAEMONS, "srun", "sinfo", "scancel") if _which(program) is None]
    if missing:
        return f"SLURM needs {', '.join(missing)}: apt-get install slurm-wlm munge"
    return None


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """SLURM, started when the first test asks for it and ended with the session.

    ``conftest.py`` names this file as a plugin, and the tests that use it are of ``xdist_group("slurm")``: so it is
    started once, and not for each module or worker.
    """
    reason = slurm_missing()
    if reason is not None:
        pytest.skip(reason)
    with local_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="session")
def slurm_environ(request: pytest.FixtureRequest) -> dict[str, str]:
    """What srun needs to find the tests' SLURM, started before the first test, where it can be."""
    if slurm_missing():
        return {}
    running: Slurm = request.getfixturevalue("slurm")
    return {"SLURM_CONF": running.env["SLURM_CONF"]}


@contextmanager
def local_slurm(folder: Path) -> Iterator[Slurm]:
    """Run SLURM with all its files in ``folder``, and end its processes afterwards."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    controller_port, *node_ports = free_ports(1 + len(NODES))
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            folder=folder,
            host=socket.gethostname(),
            user=user,
            controller_port=controller_port,
            first_job=1 + secrets.randbelow(MOST_FIRST_JOB),
            nodes=",".join(NODES),
            node_ports=",".join(map(str, node_ports)),
        )
    )
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    (folder / "state").mkdir()
    env = {**os.environ, "SLURM_CONF": str(config)}
    with ExitStack() as running:
        munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        # force: folders under /tmp are writable by others, which munged would refuse.
        _start(running, folder, env, "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge)
        _wait_for((folder / "munge.socket").exists, folder)
        _start(running, folder, env, "slurmctld", "-D")
        nodes = {}
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
            nodes[node] = _start(running, folder, env, "slurmd", "-D", "-N", node)
        _wait_for(lambda: _idle_nodes(env) == len(NODES), folder)
        running.callback(subprocess.run, ["scancel", f"--user={user}"], env=env, check=False, timeout=30)
        yield Slurm(srun=("srun",), env=env, _nodes=nodes)


def _which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


def _start(running: ExitStack, folder: Path, env: dict[str, str], program: str, *args: str) -> subprocess.Popen[bytes]:
    with open(folder / f"{program}.out", "ab") as output:
        process = subprocess.Popen([str(_which(program)), *args], env=env, stdout=output, stderr=output)
    running.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _idle_nodes(env: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--partition=all", "--states=idle", "--format=%D"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return sum(int(line) for line in run.stdout.split() if line.isdigit())


def _wait_for(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(folder.glob("*.out")))
            raise TimeoutError(f"SLURM did not start within {START_S:g} s.\n{logs}")
        time.sleep(0.1)
