"""A script's own objects in a checkpoint: refilled in place, of the same class, or refused with their place."""

from __future__ import annotations

import datetime
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

import unitrain
from unitrain import CheckpointError


def refill(folder: Path, background: bool) -> None:
    """Save a history, resume from it into another, and go back to it."""
    with unitrain.init(backend="single" if background else "ddp", device="cpu") as strategy:
        saved: dict[str, Any] = {
            "losses": [1.0, [2.0]],
            "per class": {"a": {"right": [1]}},
            "counts": Counter("aab"),
            "lists": {"b": [3]},
            "shared": [{"a": 1}, {"a": 2}],
        }
        made = {"ordered": OrderedDict(b=1, a=2), "counted": Counter("ab")}
        checkpoint = strategy.checkpoint(folder, background=background, history={**saved, **made}, steps=Counter(a=2))
        checkpoint.save()
        checkpoint.close()
        same = {"a": 0}
        history: dict[str, Any] = {
            "losses": [],
            "per class": {"a": {"right": []}, "b": {}},
            "counts": Counter(c=1),
            "lists": defaultdict(list),
            "shared": [same, same],
        }
        steps = Counter(a=1)
        losses, right, counts = history["losses"], history["per class"]["a"]["right"], history["counts"]
        checkpoint = strategy.checkpoint(folder, background=background, history=history, steps=steps)
        for _ in range(2):
            assert checkpoint.resume()
            assert (losses, right, counts, steps) == ([1.0, [2.0]], [1], Counter("aab"), {"a": 2})
            assert history == {**saved, **made}
            kinds = [type(value) for value in history.values()]
            assert kinds == [list, dict, Counter, defaultdict, list, OrderedDict, Counter]
            assert history["losses"] is losses
            losses.append(3.0)
            right.clear()
            counts["a"] += 5


def test_lists_and_dicts_are_refilled_in_place(tmp_path: Path) -> None:
    refill(tmp_path / "single", True)
    run_ranks(refill, tmp_path / "ddp", False)


def test_scalars_of_numpy_are_numbers(tmp_path: Path) -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        module = nn.Linear(1, 1)
        optimizer = SGD(module.parameters(), lr=np.float64(0.1))
        model, optimizer, plateau = strategy.prepare(module, optimizer, ReduceLROnPlateau(optimizer))
        plateau.step(np.float32(0.25))
        history = {"best": np.float64(0.25), "at": (np.int64(3), [np.bool_(True)]), np.int64(7): 1}
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "plateau": plateau, "history": history}
        checkpoint = strategy.checkpoint(tmp_path / "run", **objects)
        checkpoint.save()
        history.clear()
        assert checkpoint.resume()
        assert repr(history) == "{'best': 0.25, 'at': (3, [True]), 7: 1}"
        assert plateau.best == 0.25
        strategy.save({"best": np.float32(0.5)}, tmp_path / "best.pt")
        assert repr(strategy.load(tmp_path / "best.pt")) == "{'best': 0.5}"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.arange(3), r"history\['a'\]\[1\] is a ndarray: numpy\..*_reconstruct is neither a tensor nor plain data"),
        (datetime.date(2026, 1, 1), r"history\['a'\]\[1\] is a date: datetime.date is neither"),
        (defaultdict(list, b=[1]), r"history\['a'\]\[1\] is a defaultdict: "),
        ({"b": {1: [lambda: None]}}, r"history\['a'\]\[1\]\['b'\]\[1\]\[0\] is a function: .*Can't "),
    ],
)
def test_what_can_not_be_saved_is_named_with_its_place(tmp_path: Path, value: Any, said: str) -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        history = {"a": (torch.ones(3), value)}
        checkpoint = strategy.checkpoint(tmp_path, background=False, model=nn.Linear(1, 1), history=history)
        with pytest.raises(CheckpointError, match=rf"step-0000000000 could not be written: {said}"):
            checkpoint.save()
