"""What the starts of a job of ``phases.py`` did, which was killed and started again."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from harness import ONE, TORCHRUN, World
from jobs import run_job
from places import TESTS
from program import GLOBAL_BATCH, RANK_VARIABLES, SAMPLES

PHASES = TESTS / "faults" / "programs" / "phases.py"
EPOCHS, PAUSE_S, RESTARTS = 6, 0.03, 5
STEPS = EPOCHS * -(-SAMPLES // GLOBAL_BATCH)
# A kill comes so many seconds after the first step of a start, or after its first process.
MOST_S, MOST_START_S, AT_START = 2.5, 6.0, 0.15


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on one process to which nothing happened."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(ONE.command(1, str(folder), str(EPOCHS), program=PHASES), folder, {"TESTS_PAUSE": "0"})
    return folder


def train(
    command: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    meanwhile: Callable[[subprocess.Popen[bytes]], object] = lambda process: None,
) -> str:
    """Run a job to its end, and return what it has printed."""
    given = {"TESTS_PAUSE": str(PAUSE_S), "OMP_NUM_THREADS": "1", **environ}
    job = run_job(command, folder, environ=given, deadline=400, meanwhile=meanwhile)
    assert job.code == 0, job.output
    assert job.left == (), job.output
    return job.output


@dataclass
class Life:
    """What one start of the job did."""

    began: int
    """The step that it went on from."""
    steps: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """The samples of each step that it began, as (epoch, sample)."""


def lives(folder: Path) -> dict[int, Life]:
    """Return the starts that have come to training, by the time of each, the earliest first."""
    found: dict[int, Life] = {}
    for file in sorted(folder.glob("*.notes"), key=lambda file: int(file.name.split(".")[0])):
        start, began, _ = file.name.split(".", 2)
        life = found.setdefault(int(start), Life(int(began)))
        for line in file.read_text().splitlines():
            if line.endswith("}"):  # it may have been killed within a line
                noted = json.loads(line)
                life.steps.setdefault(noted["step"], []).extend((noted["epoch"], one) for one in noted["ids"])
    return found


def samples(folder: Path) -> list[tuple[int, int]]:
    """Return every sample that counted, as (epoch, sample), in order."""
    counted: dict[int, list[tuple[int, int]]] = {}
    for life in lives(folder).values():
        counted.update(life.steps)  # what was done again counts once
    return sorted(one for step in counted.values() for one in step)


def ranks(folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Yield the ranks of the job that runs in a folder, with their processes."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, StopIteration):
            command = process.cmdline()
            if str(PHASES) in command[1:3] and str(folder) in command:  # a launcher has it further behind
                environ = process.environ()
                yield int(next(environ[name] for name in RANK_VARIABLES if name in environ)), process


def begun_again(folder: Path) -> list[int]:
    """Return how many steps each start but the first made again that the one before had begun."""
    found = lives(folder).values()
    return [max(before.steps, default=before.began - 1) + 1 - after.began for before, after in pairwise(found)]


def assert_undisturbed(folder: Path, undisturbed: Path) -> None:
    """Assert that all starts together have trained what a run did to which nothing happened."""
    assert samples(folder) == samples(undisturbed), "each sample once an epoch"
    trained, expected = (
        [torch.load(one / f"checkpoints/step-{STEPS:010d}" / name) for name in ("model.pt", "history.pt")]
        for one in (folder, undisturbed)
    )
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-9)


@dataclass
class Killer:
    """Kills one rank of each start of a job but the last, and says how many the next one is to have."""

    folder: Path
    plan: tuple[int, ...]
    drawn: random.Random
    at_start: float = AT_START
    """The probability that a kill comes before the first step."""
    met: list[str] = field(default_factory=list)
    """The phases in which the kills met their ranks."""

    def __post_init__(self) -> None:
        (self.folder / "ranks").write_text(str(self.plan[0]))

    def run(self, process: subprocess.Popen[bytes]) -> None:
        for following in self.plan[1:]:
            before = {rank.pid for _, rank in ranks(self.folder)} if self.met else set()
            known = set(lives(self.folder))
            at_start = self.drawn.random() < self.at_start
            moment = self.drawn.uniform(0, MOST_START_S if at_start else MOST_S)

            def has_begun(at_start: bool = at_start, before: set[int] = before, known: set[int] = known) -> bool:
                if at_start:
                    return any(rank.pid not in before for _, rank in ranks(self.folder))
                return any(life.steps for start, life in lives(self.folder).items() if start not in known)

            while not has_begun():
                if process.poll() is not None:
                    return
                time.sleep(0.05)
            time.sleep(moment)
            (self.folder / "ranks").write_text(str(following))
            self._kill()

    def _kill(self) -> None:
        alive = sorted(ranks(self.folder), key=lambda rank: rank[0])
        if alive:
            number, process = self.drawn.choice(alive)
            with suppress(psutil.NoSuchProcess):  # it has ended by itself
                process.kill()
                phase = self.folder / f"{number}.phase"
                self.met.append(f"{phase.read_text().strip() if phase.exists() else 'start'} of rank {number}")
        for phase in self.folder.glob("*.phase"):
            phase.unlink()


def restarting(world: World, folder: Path, plan: tuple[int, ...]) -> list[str]:
    """Return a command that is started again when a rank is killed, with as many ranks as the file ``ranks`` says."""
    command = world.command(plan[0], str(folder), str(EPOCHS), program=PHASES)
    if len(set(plan)) == 1:
        if world == TORCHRUN:
            return [command[0], "--max-restarts", str(RESTARTS), *command[1:]]
        return ["unitrain", "run", "--max-restarts", str(RESTARTS), "--", *command]
    count = command.index(str(plan[0]))
    line = f'{shlex.join(command[:count])} "$(cat ranks)" {shlex.join(command[count + 1 :])}'
    return ["unitrain", "run", "--max-restarts", str(RESTARTS), "--", "bash", "-c", f"exec {line}"]
