"""Starts real jobs with a fault, and checks how they end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forked_python
import psutil
import pytest
import torch
from free_ports import free_port
from jobs import Job, run_job
from places import TESTS
from slurm import slurm_missing

from unitrain.checkpoint.sharded.opening import opened
from unitrain.checkpoint.store.located import checkpoint_at
from unitrain.launch.local.toolchain import find_program

PROGRAM = TESTS / "faults" / "programs" / "program.py"
BY_HAND = TESTS / "faults" / "programs" / "by_hand.py"
STEPS = 40
HEARTBEAT_S, TIMEOUT_S = 3.0, 8.0
QUICK = {"UNITRAIN_HEARTBEAT_TIMEOUT_S": str(HEARTBEAT_S), "UNITRAIN_TIMEOUT_S": str(TIMEOUT_S)}
COPIED = {"UNITRAIN_MEMORY_COPIES__EVERY": "1"}
"""The settings of a run that copies its state in memory after each step."""
_HAS_HOROVOD = find_spec("horovod") is not None


@dataclass(frozen=True)
class World:
    """A launcher and a backend."""

    launcher: str
    """"forked" before its name forks it and its ranks, which share one import of torch (``forked_python.py``)."""
    backend: str

    def __str__(self) -> str:
        return f"{self.launcher}-{self.backend}".replace(" ", "-")

    def command(self, ranks: int, *arguments: str, program: Path = PROGRAM) -> list[str]:
        """Return the command that starts the program."""
        script = [str(program), *arguments]
        count = str(ranks)
        if self.launcher == "forked":
            return [sys.executable, str(BY_HAND), str(free_port()), count, *forked_python.command(*script)]
        starts: dict[str, list[str]] = {
            "plain": [sys.executable, str(BY_HAND), str(free_port()), count, sys.executable],
            "torchrun": ["torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", count],
            "mpirun": ["mpirun", "--oversubscribe", "-np", count, sys.executable],
            "horovodrun": ["horovodrun", "--gloo", "-np", count, sys.executable],
            "srun": ["srun", "-n", count, sys.executable],
        }
        return [*starts[self.launcher.removeprefix("forked ")], *script]

    @property
    def missing(self) -> str:
        """Why it can't run here, or an empty string."""
        if self.launcher == "srun" and (reason := slurm_missing()):
            return reason
        if "horovod" in f"{self.launcher} {self.backend}" and not _HAS_HOROVOD:
            return "horovod is not installed"
        return "mpirun is not installed" if self.launcher == "mpirun" and find_program("mpirun") is None else ""


# The ranks of forked worlds are those of plain ones, without a launcher. Nobody can read the command and environment of
# a fork from outside: a rank that looks for those that have not joined, say.
ONE, FORKED, FORKED_HOROVOD = World("forked", "auto"), World("forked", "ddp"), World("forked horovodrun", "horovod")
PLAIN, TORCHRUN = World("plain", "ddp"), World("torchrun", "ddp")
MPIRUN, HOROVODRUN = World("mpirun", "horovod"), World("horovodrun", "horovod")
MPIRUN_DDP = World("mpirun", "ddp")
EVERY = (PLAIN, TORCHRUN, MPIRUN, MPIRUN_DDP, HOROVODRUN)
"""Launchers that start real processes, with their backends."""


def worlds(*quick: World, later: Sequence[World] = (), soak: Sequence[World] = ()) -> pytest.MarkDecorator:
    """Parametrise a test by worlds: those of ``make test``, those of ``make test-all``, and those of ``make soak``.

    One that can't run here is skipped, and says why.
    """
    in_test_all = pytest.mark.all("a second launcher, or one that is not forked")
    return pytest.mark.parametrize(
        "world",
        [
            pytest.param(
                one,
                id=str(one),
                marks=[
                    pytest.mark.skipif(bool(one.missing), reason=one.missing),
                    *([in_test_all] if one in later else []),
                    *([pytest.mark.soak] if one in soak else []),
                ],
            )
            for one in (*quick, *later, *soak)
        ],
    )


@dataclass(frozen=True)
class End:
    """How a job with a fault ended."""

    job: Job
    seconds: float
    """Seconds from the fault to the end of the job."""
    world: World
    fault: str

    def assert_failed_within(self, seconds: float) -> None:
        """Assert that the job failed, soon after the fault."""
        assert self.job.code != 0
        assert self.seconds < seconds

    def said(self, rank: int) -> str:
        """Return the one line that a surviving rank prints."""
        found = self._lines(rf"unitrain: rank {rank} on \S+ \(pid \d+\): stopped because (.*)")
        assert len(found) == 1, self.job.output
        return found[0]

    def note(self) -> None:
        """Record it for the report."""
        found = self._lines(r"unitrain: (.*stopped because .*|stopped by .*|received a second .*|error: .*)")
        said = re.sub(r" on \S+ \(pid \d+\)", "", found[0]).split(". Rank")[0].split('", line')[0] if found else ""
        said = re.sub(r"\[/\S+\] ", "", re.sub(r"/\S+/checkpoints", "FOLDER", said))  # places in gloo's source
        said = re.sub(r"/\S+/(?=program\.py:)", "", said)
        note(fault=self.fault, world=str(self.world), seconds=self.seconds, code=self.job.code, said=said)

    def _lines(self, pattern: str) -> list[str]:
        return [str(found) for found in re.findall(pattern, self.job.output)]


Kills = Callable[[World], tuple[End, Path]]


def note(**row: Any) -> None:
    """Append a line for ``report.py``, if a report is wanted."""
    if "TESTS_ENDS" in os.environ:
        with Path(os.environ["TESTS_ENDS"]).open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def run(
    world: World,
    folder: Path,
    *,
    steps: int = STEPS,
    fault: str = "none:0:0",
    ranks: int = 2,
    pause: float = 0.0,
    environ: Mapping[str, str] | None = None,
    meanwhile: Callable[[subprocess.Popen[bytes]], object] | None = None,
    program: Path = PROGRAM,
    output: str = "",
    under: Sequence[str] = (),
) -> End:
    """Train for a total number of steps, with a fault (KIND:RANK:STEP) on the way.

    The output may be redirected as in a shell, and the launcher may run ``under`` another command. A job that is to
    end well has the default timeouts, which a busy machine keeps.
    """
    (folder / "fault").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if world.launcher.startswith("forked "):
            forked_python.use(monkeypatch)
        command = [*under, *world.command(ranks, str(folder), str(steps), fault, program=program)]
        if output:
            command = ["bash", "-c", f'exec "$@" {output}', "bash", *command]
        job = run_job(
            command,
            folder,
            environ={
                **({} if fault.startswith("none") and meanwhile is None else QUICK),
                "UNITRAIN_BACKEND": world.backend,
                "TESTS_PAUSE": str(pause),
                **(environ or {}),
            },
            deadline=100,
            meanwhile=meanwhile or (lambda process: None),
        )
    left = [*job.left, *forked_python.end_left()]
    assert not left, f"it left processes: {left}\n{job.output}"
    happened = (folder / "fault").read_text() if (folder / "fault").exists() else ""
    seconds = job.ended - float(happened) if happened else 0.0
    end = End(job, seconds, world, "signals from outside" if fault.startswith("none") else fault)
    if happened:
        end.note()
    return end


def when_step(folder: Path, step: int, action: Callable[[subprocess.Popen[bytes]], object]) -> Callable[[Any], None]:
    """Return a function that waits until the job has reached a step, and then calls another one."""

    def act(process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 60
        while not any(note["step"] >= step for note in notes(folder)):
            assert process.poll() is None, "it ended before"
            assert time.monotonic() < deadline, f"it never came to step {step}"
            time.sleep(0.02)
        (folder / "fault").write_text(str(time.time()))
        action(process)

    return act


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the training processes of a job; empty after its end."""
    if forked_python.is_forked(process.args):
        return forked_python.running()
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # a launcher's helpers come and go
                if str(PROGRAM) in child.cmdline()[1:3]:  # a launcher has it further behind; torchrun gives python a -u
                    found.append(child)
    return found


def notes(folder: Path) -> list[dict[str, Any]]:
    """Return what counted: of a step that was made again after a failure, what was noted last."""
    by_step: dict[int, tuple[int, list[dict[str, Any]]]] = {}
    for file in sorted(folder.glob("*.notes"), key=lambda file: int(file.name.split(".")[0])):
        part = int(file.name.split(".")[0])
        for line in file.read_text().splitlines():
            if not line.endswith("}"):
                continue  # it was killed within a line
            note = json.loads(line)
            if note["step"] not in by_step or by_step[note["step"]][0] < part:
                by_step[note["step"]] = (part, [])
            by_step[note["step"]][1].append(note)
    return [note for _, (_, made) in sorted(by_step.items()) for note in made]


def losses(folder: Path) -> list[float]:
    """Return each step's loss: the mean over all its samples, of all ranks and micro-batches."""
    total: dict[int, float] = defaultdict(float)
    count: dict[int, int] = defaultdict(int)
    for note in notes(folder):
        total[note["step"]] += note["loss"]
        count[note["step"]] += len(note["ids"])
    return [total[step] / count[step] for step in sorted(total)]


def samples(folder: Path) -> list[tuple[int, int]]:
    """Return every sample seen, as (epoch, sample), in order."""
    return sorted((note["epoch"], sample) for note in notes(folder) for sample in note["ids"])


@pytest.fixture(scope="session")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Kills:
    """Return a function that kills rank 1 of a job after step 8, once in each world, and returns end and folder.

    There is a copy in memory of each step but the last.
    """

    @cache
    def kill(world: World) -> tuple[End, Path]:
        folder = tmp_path_factory.mktemp("killed")
        return run(world, folder, fault="kill:1:8", environ=COPIED), folder

    return kill


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run on one process."""
    return train_alone(tmp_path_factory, STEPS)


def train_alone(tmp_path_factory: pytest.TempPathFactory, steps: int) -> Path:
    """Make so many steps on one process, and return the folder."""
    folder = tmp_path_factory.mktemp("alone")
    end = run(ONE, folder, ranks=1, steps=steps)
    assert end.job.code == 0, end.job.output
    return folder


def assert_same_training(folder: Path, alone: Path) -> None:
    """Assert that the parts of a run together equal the uninterrupted run."""
    assert samples(folder) == samples(alone), "each sample once an epoch"
    assert losses(folder) == pytest.approx(losses(alone), rel=0, abs=1e-9)
    assert_same_weights(folder, alone)


def assert_same_weights(folder: Path, alone: Path) -> None:
    """Assert that a run ended with the weights of the uninterrupted run."""
    torch.testing.assert_close(weights(folder), weights(alone), rtol=0, atol=1e-9)


def weights(folder: Path) -> dict[str, Any]:
    """Return the weights in the newest checkpoint, which several ranks may have written."""
    found = opened(checkpoint_at(folder / "checkpoints" / saved(folder)[-1]))
    return {name: found.tensor(value) for name, value in found.parts["model"].items()}


def saved(folder: Path) -> list[str]:
    """Return the names in the folder of checkpoints."""
    return sorted(os.listdir(folder / "checkpoints"))
