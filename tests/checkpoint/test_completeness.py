"""A warning of what a run trains with and its checkpoints lack."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
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


def missing_optimizer(folder: Path, backend: str, settings: dict[str, Any]) -> list[str]:
    with (
        unitrain.init(backend=backend, device="cpu", **settings) as strategy,
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        module = nn.Linear(2, 1)
        model, optimizer = strategy.prepare(module, SGD(module.parameters(), lr=0.1, momentum=0.9))
        checkpoint = strategy.checkpoint(folder, background=False, model=model)
        strategy.step(model(torch.ones(1, 2)).mean(), optimizer)
        checkpoint.save()
    return [str(warning.message) for warning in seen if "don't contain" in str(warning.message)]


@pytest.mark.parametrize(("backend", "settings"), [("fsdp", {}), ("ddp", {"shard_optimizer": True})])
def test_an_optimizer_of_shards_is_missed_as_well(tmp_path: Path, backend: str, settings: dict[str, Any]) -> None:
    messages_of_ranks = run_ranks(missing_optimizer, tmp_path, backend, settings)
    assert [len(messages_of_rank) for messages_of_rank in messages_of_ranks] == [1, 0]


def test_the_fold_before_lacks_nothing(tmp_path: Path) -> None:
    """In a cross-validation with one strategy, each fold has its model, its optimizer and its folder."""

    def train(fold: int, *, saves_optimizer: bool = True) -> list[str]:
        module = nn.Linear(2, 1)
        model, optimizer = strategy.prepare(module, SGD(module.parameters(), lr=0.1, momentum=0.9))
        loader = strategy.dataloader(TensorDataset(torch.ones(8, 2)), global_batch_size=4)
        kept.append((model, optimizer, loader, scheduler := StepLR(optimizer, 1)))
        objects: dict[str, Any] = {"model": model, "scheduler": scheduler, "loader": loader}
        if saves_optimizer:
            objects["optimizer"] = optimizer
        checkpoint = strategy.checkpoint(tmp_path / str(fold), background=False, **objects)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in loader.epochs(2):
                for (x,) in loader:
                    strategy.step(model(x).mean(), optimizer, scheduler)
                checkpoint.save()
        checkpoint.close()
        return [str(warning.message) for warning in seen]

    kept: list[Any] = []
    with unitrain.init(backend="single", device="cpu") as strategy:
        assert train(0) == train(1) == []
        [message] = train(2, saves_optimizer=False)
        assert "trains with an optimizer (SGD) that" in message


def test_what_is_complete_or_meant_or_would_lose_nothing_says_nothing(tmp_path: Path) -> None:
    assert messages(tmp_path / "complete", *EVERYTHING) == []
    with_plateau = ("optimizer", "loader", "plateau")
    assert messages(tmp_path / "plateau", *with_plateau, made=with_plateau) == []
    assert messages(tmp_path / "meant", partial=True) == []
    assert messages(tmp_path / "plain", "loader", made=(), momentum=0) == []
