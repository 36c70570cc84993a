"""The best checkpoint: kept beside the newest, found by name, and the same as what the newest one's state says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from saved_run import SavedRun, steps_in
from torch import nn

import unitrain
from unitrain import CheckpointError, Strategy
from unitrain.checkpoint.store.store import NAME as MANIFEST


class Run(SavedRun):
    """A run, and what is found where it saves."""

    @property
    def steps(self) -> list[int]:
        return steps_in(self.place)


@pytest.mark.parametrize("background", [False, True])
def test_the_best_is_kept_until_a_better_one_is_saved(strategy: Strategy, tmp_path: Path, background: bool) -> None:
    run = Run(strategy, tmp_path, background=background)
    assert not run.checkpoint.resume("best"), "there is no checkpoint at all"
    run.save(1)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is marked as the best: save\(best=True\) marks"):
        run.checkpoint.resume("best")
    run.save(2, best=True).save(3, 4, 5)
    assert run.steps == [5, 4, 2]
    assert run.resumed("best") == 2
    assert run.resumed() == 5
    assert run.save(6, best=True).steps == [6, 5]
    assert run.save(6).steps == [6, 5], "saved again at the same step, as a signal does"
    assert run.save(7, 8, 9).steps == [9, 8, 6]
    run.checkpoint.close()
    again = Run(strategy, tmp_path, background=background)
    assert again.resumed() == 9
    assert again.save(10, 11).steps == [11, 10, 6], "the mark outlives the process"
    assert again.resumed("best") == 6
    again.checkpoint.discard()
    assert {path.name for path in tmp_path.iterdir()} <= {".lock", "run.json"}


def test_going_back_before_the_best_leaves_the_one_that_was_the_best_then(strategy: Strategy, tmp_path: Path) -> None:
    run = Run(strategy, tmp_path, keep=9).save(1, best=True).save(2).save(3, best=True).save(4)
    assert run.resumed(tmp_path / "step-0000000002") == 2
    assert run.save(5).steps == [5, 2, 1]
    assert run.resumed("best") == 1


def test_what_could_not_be_written_is_not_the_best(strategy: Strategy, tmp_path: Path) -> None:
    run = Run(strategy, tmp_path, keep=1).save(1, best=True)
    run.notes["code"] = print
    with pytest.raises(CheckpointError, match="could not be written"):
        run.save(2, best=True)
    run.notes.clear()
    assert run.save(3).steps == [3, 1]
    assert run.resumed("best") == 1


def test_a_damaged_best_is_an_error_and_a_damaged_newest_one_is_not(
    strategy: Strategy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(strategy, tmp_path).save(1, best=True).save(2, 3)
    (tmp_path / "step-0000000003" / MANIFEST).write_text("{")
    assert run.resumed("best") == 1
    assert "skipping a damaged checkpoint: " in capsys.readouterr().err
    (tmp_path / "step-0000000001" / "model.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"the best checkpoint is damaged: .*/step-0000000001/model\.pt: 0 bytes"):
        run.checkpoint.resume("best")


def marks(folder: str, differ: bool) -> tuple[str, list[str]]:
    with unitrain.init(backend="ddp", device="cpu", accumulate=2) as strategy:
        model, optimizer = strategy.prepare(module := nn.Linear(2, 1), torch.optim.SGD(module.parameters(), lr=0.1))
        checkpoint = strategy.checkpoint(folder, keep=1, model=model, optimizer=optimizer)
        try:
            for micro_batch in range(8):
                strategy.step(model(torch.ones(1, 2)).sum(), optimizer)
                if micro_batch % 2 == 0:  # within a window
                    checkpoint.save(best=micro_batch == 2 and (strategy.is_main or not differ))
            checkpoint.wait()
        except unitrain.UsageError as error:
            return str(error), []
        return "", sorted(os.listdir(folder))


def test_ranks_that_do_not_agree_on_the_best_are_told_so(tmp_path: Path) -> None:
    said = "save(best=...) got True on rank 0; False on rank 1: decide on a value that is the same on all ranks"
    for text, _ in run_ranks(marks, str(tmp_path / "a"), True):
        assert text.startswith(said)
    found = [".lock", "run.json", "step-0000000002", "step-0000000004"]
    assert run_ranks(marks, str(tmp_path / "b"), False) == [("", found)] * 2


KILLED = """
import os, pathlib, signal, sys
import torch
import unitrain
from torch import nn

strategy = unitrain.init(backend="single", device="cpu")
model, notes = nn.Linear(1, 1), {"best": 0}

def opened(folder):
    return strategy.checkpoint(folder, model=model, notes=notes, keep=1, background=False)

def save(checkpoint, step):
    strategy._step.global_step = notes["best"] = step
    nn.init.constant_(model.weight, step)
    checkpoint.save(best=True)

def die_at(victim):
    calls = 0
    def counted(real):
        def call(*args, **keywords):
            nonlocal calls
            calls += 1
            if calls == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **keywords)
        return call
    for name in ("fsync", "rename", "replace", "open", "mkdir", "symlink", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))

def survives(folder, victim):
    child = os.fork()
    if not child:
        checkpoint = opened(folder)
        save(checkpoint, 1)
        die_at(victim)
        save(checkpoint, int(sys.argv[2]))
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

victim, survived = 0, False
while not survived:
    victim += 1
    folder = pathlib.Path(sys.argv[1], str(victim))
    survived = survives(folder, victim)
    checkpoint = opened(folder)
    assert checkpoint.resume()
    newest = notes["best"]
    assert checkpoint.resume("best")
    assert model.weight.item() == strategy.global_step == notes["best"] == newest
    save(checkpoint, 3)
    assert {path.name for path in folder.glob("step-*")} == {"step-0000000003"}, "nothing is left"
    checkpoint.close()
    print(newest)
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("step", ["2", pytest.param("1", marks=pytest.mark.all("the same step again"))])
def test_a_kill_within_a_save_leaves_the_old_or_the_new_one_whole_and_the_best(tmp_path: Path, step: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), step], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    newest = done.stdout.split()
    assert newest == sorted(newest)
    assert (newest[0], newest[-1]) == ("1", step)
    assert len(newest) > 20
    assert newest.count(step) > 5, "killed after it was whole, and before the old one was removed"
