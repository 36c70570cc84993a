"""Ranks are killed at random moments, without any periodic checkpoint: each kill costs at most the step that it met.

The job is started again by ``unitrain run`` or torchrun, with as many ranks as before or not, and comes to its end.
"""

from __future__ import annotations

import random
import shlex
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from harness import HOROVODRUN, MPIRUN, MPIRUN_DDP, TORCHRUN, World, note, worlds
from lives import EPOCHS, PHASES, assert_undisturbed, begun_again, lives, ranks, train, undisturbed
from slurm import Slurm, slurm_missing

__all__ = ["undisturbed"]  # the fixture
pytestmark = [pytest.mark.launcher, pytest.mark.soak, pytest.mark.timeout(900), pytest.mark.xdist_group("slurm")]

RESTARTS = 5
# The ranks of each start of a job. All but the last are killed.
SAME, OTHER = (3, 3, 3, 3, 3), (2, 3, 2, 3, 1)
# A kill comes so many seconds after the first step of a start, or after its first process.
MOST_S, MOST_START_S, STARTS = 2.5, 6.0, 0.15
SRUN = World("srun", "ddp")


@dataclass
class Killer:
    """Kills one rank of each start of a job but the last, and says how many the next one is to have."""

    folder: Path
    plan: tuple[int, ...]
    drawn: random.Random
    met: list[str] = field(default_factory=list)
    """The phases in which the kills met their ranks."""

    def __post_init__(self) -> None:
        (self.folder / "ranks").write_text(str(self.plan[0]))

    def run(self, process: subprocess.Popen[bytes]) -> None:
        for following in self.plan[1:]:
            before = {rank.pid for _, rank in ranks(self.folder)} if self.met else set()
            known = set(lives(self.folder))
            at_start = self.drawn.random() < STARTS
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


def commanded(world: World, folder: Path, plan: tuple[int, ...]) -> list[str]:
    """Return a command that is started again when a rank is killed, with as many ranks as the file ``ranks`` says."""
    command = world.command(plan[0], str(folder), str(EPOCHS), program=PHASES)
    if len(set(plan)) == 1:
        if world == TORCHRUN:
            return [command[0], "--max-restarts", str(RESTARTS), *command[1:]]
        return ["unitrain", "run", "--max-restarts", str(RESTARTS), "--", *command]
    count = command.index(str(plan[0]))
    line = f'{shlex.join(command[:count])} "$(cat ranks)" {shlex.join(command[count + 1 :])}'
    return ["unitrain", "run", "--max-restarts", str(RESTARTS), "--", "bash", "-c", f"exec {line}"]


@worlds(TORCHRUN, MPIRUN, MPIRUN_DDP, HOROVODRUN, SRUN)
@pytest.mark.parametrize("plan", [SAME, OTHER], ids=["same", "other"])
def test_a_kill_costs_at_most_a_step(
    world: World, plan: tuple[int, ...], tmp_path: Path, undisturbed: Path, request: pytest.FixtureRequest
) -> None:
    environ = {"UNITRAIN_BACKEND": world.backend}
    if world == SRUN:
        if reason := slurm_missing():
            pytest.skip(reason)
        running: Slurm = request.getfixturevalue("slurm")
        environ |= running.env
    killer = Killer(tmp_path, plan, random.Random(f"{world} {plan}"))
    output = train(commanded(world, tmp_path, plan), tmp_path, environ, killer.run)

    again = begun_again(tmp_path)
    note(killed=len(killer.met), phases=killer.met, world=str(world), plan=plan, again=again)
    assert len(killer.met) == len(plan) - 1, output
    assert all(steps <= 1 for steps in again), f"{killer.met} {again}\n{output}"
    assert_undisturbed(tmp_path, undisturbed)
