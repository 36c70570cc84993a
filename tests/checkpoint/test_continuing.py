"""Errors about what a run is resumed from, and where it saves, come before the first step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from saved_run import folder_of, steps_in
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import TensorDataset

import unitrain
from unitrain import CheckpointError


def test_other_settings_are_listed_and_refused_unless_forced(tmp_path: Path) -> None:
    with unitrain.init(backend="single") as strategy:
        strategy.checkpoint(tmp_path, config={"lr": 0.1, "epochs": 3}, model=nn.Linear(2, 1), background=False).save()
    with unitrain.init(backend="single", clip_norm=1.0, timeout_s=5) as strategy:
        model = nn.Linear(2, 1)
        before = nn.init.zeros_(model.weight).clone()
        checkpoint = strategy.checkpoint(tmp_path, config={"lr": 0.2, "momentum": 0.9, "epochs": 3}, model=model)
        said = (
            r"clip_norm was None and is now 1\.0; lr was 0\.1 and is now 0\.2; momentum was None and is now 0\.9\. Use"
        )
        with pytest.raises(CheckpointError, match=said):
            checkpoint.resume()
        assert torch.equal(model.weight, before)
        assert checkpoint.resume(force=True)
        assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("lr", "weight_decay", "schedule", "said"),
    [
        (0.1, 0.0, None, ""),
        (0.2, 0.5, None, "optimizer's lr is 0.1, not 0.2; optimizer's weight_decay is 0.0, not 0.5"),
        (0.1, 0.0, StepLR, ""),  # which has changed lr since
        (0.2, 0.0, StepLR, "optimizer's initial_lr is 0.1, not 0.2"),
        (0.1, 0.0, partial(OneCycleLR, total_steps=9), ""),  # which changes the momentum as well
    ],
)
def test_a_resumed_run_says_so_and_which_options_of_the_script_it_does_not_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lr: float, weight_decay: float, schedule: Any, said: str
) -> None:
    def run(lr: float, weight_decay: float) -> None:
        strategy = unitrain.init(backend="single")
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay)
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if schedule:
            objects["scheduler"] = schedule(optimizer, 1)
        strategy.prepare(*objects.values())
        checkpoint = strategy.checkpoint(tmp_path, background=False, **objects)
        checkpoint.resume()
        strategy.step(model(torch.ones(1, 2)).sum(), optimizer, objects.get("scheduler"))
        checkpoint.save()
        strategy.close()

    run(0.1, 0.0)
    assert not capsys.readouterr().err
    run(lr, weight_decay)
    resumed, *options = capsys.readouterr().err.splitlines()
    assert resumed == f"unitrain: resumed after step 1, from {folder_of(tmp_path, 1)}"
    line = f"unitrain: as saved, and not as this script has made it: {said}. To train with the script's"
    assert [option[: len(line)] for option in options] == ([line] if said else [])


def train_among_others(folder: str, first: str) -> tuple[int, str]:
    """Open a checkpoint, call a method of it or none, train, and return the steps and the error."""
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        model, optimizer = strategy.prepare(module := nn.Linear(2, 1), torch.optim.SGD(module.parameters(), lr=0.1))
        loader = strategy.dataloader(TensorDataset(torch.ones(6, 2)), global_batch_size=2)
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer, loader=loader)
        if first:
            getattr(checkpoint, first)()
        before, said = strategy.global_step, ""
        try:
            for _ in loader.epochs(2):
                for (inputs,) in loader:
                    strategy.step(model(inputs).sum(), optimizer)
            checkpoint.save()
        except CheckpointError as error:
            said = str(error)
        return strategy.global_step - before, said


def test_another_run_s_checkpoints_are_found_before_the_first_step(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert run_ranks(train_among_others, folder, "") == [(6, "")] * 2
    said = (
        f"{folder} contains checkpoints of another run, up to step-0000000006: call resume() to continue that run, or "
        "discard() to remove them, before training, or use another folder."
    )
    assert run_ranks(train_among_others, folder, "") == [(0, said)] * 2
    assert steps_in(tmp_path) == [6]
    assert run_ranks(train_among_others, folder, "resume") == [(0, "")] * 2
    assert run_ranks(train_among_others, folder, "discard") == [(6, "")] * 2


def begin(folder: str, rows: int) -> None:
    with unitrain.init(timeout_s=60) as strategy:
        strategy.checkpoint(folder, model=nn.Linear(1024, rows))


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        CheckpointError, match=rf"checkpoints can't be written to {tmp_path}/file/run: .*Not a directory"
    ):
        run_ranks(begin, str(tmp_path / "file" / "run"), 1)


def test_a_disk_with_too_little_space(small_disk: Path) -> None:
    said = rf"can't be written to {small_disk}: one needs at least 4198400 bytes, but \d{{7}} bytes are free\. Free"
    with pytest.raises(CheckpointError, match=said):
        run_ranks(begin, str(small_disk), 1024)


def test_a_run_that_goes_back_keeps_what_it_saves_afterwards(tmp_path: Path) -> None:
    """The checkpoints of the branch that it leaves are newer by number, and must not stand for the run."""
    with unitrain.init(backend="single") as strategy:
        model, optimizer = strategy.prepare(module := nn.Linear(1, 1), torch.optim.SGD(module.parameters(), lr=0.1))
        checkpoint = strategy.checkpoint(tmp_path, keep=2, background=False, model=model, optimizer=optimizer)
        for _ in range(4):
            strategy.step(model(torch.ones(1, 1)).sum(), optimizer)
            checkpoint.save()
        assert steps_in(tmp_path) == [4, 3]
        assert checkpoint.resume(tmp_path / "step-0000000003")
        strategy.step(model(torch.ones(1, 1)).sum() * 2, optimizer)
        weight = model.get_parameter("weight").detach().clone()
        checkpoint.save()
        assert steps_in(tmp_path) == [4, 3]
        assert checkpoint.resume()
        assert torch.equal(model.get_parameter("weight"), weight)
