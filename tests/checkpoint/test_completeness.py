"""A warning of what a run trains with and its checkpoints lack."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

import unitrain
from unitrain.features.ema import EMA

EVERYTHING = ("optimizer", "scheduler", "loader", "ema")


def messages(
    folder: Path, *passed: str, made: tuple[str, ...] = EVERYTHING, momentum: float = 0.9, partial: bool = False
) -> list[str]:
    """Train two epochs with ``made``, and save after each epoch, and before. Return the warnings."""
    with unitrain.init(backend="single", device="cpu") as strategy, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = nn.Linear(2, 1)
        model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1, momentum=momentum))
        data = TensorDataset(torch.ones(8, 2))
        loader, val = (strategy.dataloader(data, global_batch_size=4) for _ in range(2))
        objects: dict[str, Any] = {"optimizer": optimizer, "loader": loader}
        if "scheduler" in made:
            objects["scheduler"] = StepLR(optimizer, 1)
        if "plateau" in made:
            objects["plateau"] = ReduceLROnPlateau(optimizer)
        if "ema" in made:
            objects["ema"] = strategy.add(EMA(model))
        checkpoint = strategy.checkpoint(
            folder, background=False, partial=partial, model=model, **{name: objects[name] for name in passed}
        )
        checkpoint.save()  # nothing has trained yet
        for _ in loader.epochs(2):
            for (x,) in loader:
                strategy.step(model(x).mean(), optimizer, objects.get("scheduler"))
            with strategy.evaluation(model):
                assert sum(len(x) for (x,) in val) == 8
            checkpoint.save()
    return [f"{one.filename}: {one.message}" for one in seen]


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["optimizer"], r"an optimizer \(SGD\)"),
        (["scheduler"], "a scheduler"),
        (["plateau"], "a scheduler"),
        (["loader"], "a loader"),
        (["ema"], "an EMA"),
        (EVERYTHING, r"an optimizer \(SGD\), a scheduler, a loader, an EMA"),
    ],
)
def test_what_a_checkpoint_lacks_is_said_once(missing: Sequence[str], said: str, tmp_path: Path) -> None:
    made = ("optimizer", "loader", "plateau") if "plateau" in missing else EVERYTHING
    [message] = messages(tmp_path, *(name for name in made if name not in missing), made=made)
    assert message.startswith(f"{__file__}: this run trains with ")
    assert re.search(rf"with {said} that its checkpoints don't contain: .* or partial=True if that is meant", message)


def test_what_is_complete_or_meant_or_would_lose_nothing_says_nothing(tmp_path: Path) -> None:
    assert messages(tmp_path / "complete", *EVERYTHING) == []
    with_plateau = ("optimizer", "loader", "plateau")
    assert messages(tmp_path / "plateau", *with_plateau, made=with_plateau) == []
    assert messages(tmp_path / "meant", partial=True) == []
    assert messages(tmp_path / "plain", "loader", made=(), momentum=0) == []
