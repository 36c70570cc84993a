"""A signal stops all ranks after the same step, with a checkpoint from which the run is resumed exactly."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from harness import (
    FORKED,
    FORKED_HOROVOD,
    HOROVODRUN,
    MPIRUN,
    ONE,
    PLAIN,
    PROGRAM,
    TORCHRUN,
    World,
    assert_same_training,
    notes,
    ranks_of,
    run,
    saved,
    when_step,
    worlds,
)  # fmt: skip

pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("faults")]


@worlds(FORKED_HOROVOD, later=[MPIRUN], soak=[PLAIN, TORCHRUN, HOROVODRUN])
def test_sigterm_to_one_rank(world: World, tmp_path: Path, alone: Path) -> None:
    end = run(world, tmp_path, fault="term:1:7")
    assert end.job.code == (143 if world.launcher in ("plain", "mpirun") else 1), end.job.output
    stopped = re.findall(r"unitrain: stopped by SIGTERM after step (\d+) and saved in (\S+)\.", end.job.output)
    assert len(stopped) == 1, end.job.output
    step = int(stopped[0][0])
    assert 7 <= step <= 10
    # With a suffix after step 10, for which the program has saved a checkpoint already.
    assert Path(stopped[0][1]).with_suffix("") == tmp_path / "checkpoints" / f"step-{step:010d}"

    end = run(ONE, tmp_path, ranks=1)
    assert end.job.code == 0, end.job.output
    assert f"began after step {step}" in end.job.output
    assert_same_training(tmp_path, alone)


@worlds(FORKED, soak=[PLAIN])
@pytest.mark.parametrize(("kind", "code"), [("int", 130), pytest.param("usr1", 138, marks=pytest.mark.soak)])
def test_other_signals(world: World, kind: str, code: int, tmp_path: Path) -> None:
    end = run(world, tmp_path, fault=f"{kind}:0:7")
    assert end.job.code == code
    assert re.search(rf"stopped by SIG{kind.upper()} after step \d+ and saved in", end.job.output)
    assert "Traceback" not in end.job.output


@worlds(soak=[PLAIN])
def test_interrupted_on_a_terminal(world: World, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the group, and the launcher may pass it on once more."""

    def interrupt(process: object) -> None:
        for _ in range(2):
            for rank in ranks_of(process):  # type: ignore[arg-type]
                rank.send_signal(signal.SIGINT)

    end = run(world, tmp_path, pause=0.1, meanwhile=when_step(tmp_path, 5, interrupt))
    assert end.job.code == 130
    assert end.seconds < 30
    assert end.job.output.count("unitrain:") == 1
    assert "Traceback" not in end.job.output


@worlds(FORKED, soak=[PLAIN])
def test_a_second_signal_ends_at_once(world: World, tmp_path: Path) -> None:
    """It comes while a step lasts, in which no handler of Python's would be called."""

    def signal_twice(process: object) -> None:
        for rank in ranks_of(process):  # type: ignore[arg-type]
            rank.send_signal(signal.SIGTERM)
        time.sleep(1.5)  # what comes sooner is the same wish, passed on by a launcher
        for rank in ranks_of(process):  # type: ignore[arg-type]
            rank.send_signal(signal.SIGTERM)

    end = run(world, tmp_path, pause=20, meanwhile=when_step(tmp_path, 0, signal_twice))
    assert end.job.code == 143
    assert end.seconds < 30
    assert "unitrain: received a second SIGTERM: exiting at once." in end.job.output
    assert not any(note["step"] > 1 for note in notes(tmp_path))


@worlds(later=[TORCHRUN])
def test_sigterm_to_torchrun(world: World, tmp_path: Path) -> None:
    end = run(world, tmp_path, pause=0.1, meanwhile=when_step(tmp_path, 6, lambda process: process.terminate()))
    assert "unitrain: stopped by SIGTERM after step" in end.job.output
    assert end.job.code != 0
    assert len(saved(tmp_path)) >= 1


@worlds(soak=[TORCHRUN])
def test_torchrun_restarts_it(world: World, tmp_path: Path, alone: Path) -> None:
    command = World.command

    class Restarting(World):
        def command(self, ranks: int, *arguments: str, program: Path = PROGRAM) -> list[str]:
            made = command(self, ranks, *arguments, program=program)
            return [made[0], "--max-restarts", "2", *made[1:]]

    end = run(Restarting("torchrun", "ddp"), tmp_path, fault="kill:1:7", environ={"UNITRAIN_MEMORY_COPIES__EVERY": "0"})
    assert end.job.code == 0, end.job.output
    assert end.job.output.count("began after step 5") == 1, end.job.output
    assert_same_training(tmp_path, alone)
