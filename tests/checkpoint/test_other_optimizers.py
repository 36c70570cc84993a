"""The state of another optimizer is refused before anything is loaded, with the names of both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import unitrain
from unitrain import CheckpointError

Make = Callable[..., Optimizer]


class Own(SGD):
    """Has the options and the state of torch's SGD, and another rule."""


def train(folder: Path, make: Make, steps: int, backend: str = "single", force: bool = False) -> tuple[str, bool]:
    """Resume, train and save. Return the error of ``resume``, and whether the model is as the script has made it."""
    with unitrain.init(backend=backend, device="cpu") as strategy:
        module = nn.Linear(2, 1)
        model, optimizer = strategy.prepare(module, make(module.parameters(), lr=0.1))

        def weight() -> Tensor:
            return strategy.full_tensor(strategy.unwrap(model).get_parameter("weight").detach()).clone()

        checkpoint = strategy.checkpoint(folder, background=False, model=model, optimizer=optimizer)
        before, said = weight(), ""
        try:
            checkpoint.resume(force=force)
        except CheckpointError as error:
            said = str(error)
        same = torch.equal(weight(), before)
        if not said:
            for _ in range(steps):
                strategy.step(model(torch.ones(1, 2)).sum(), optimizer)
            checkpoint.save()
        return said, same


@pytest.mark.parametrize(
    ("saved", "now", "said"),
    [
        (SGD, Adam, "optimizer is SGD in the checkpoint, but Adam in this run"),
        (Adam, SGD, "optimizer is Adam in the checkpoint, but SGD in this run"),
        (Adam, AdamW, "optimizer is Adam in the checkpoint, but AdamW in this run"),
        (SGD, Own, "optimizer is SGD in the checkpoint, but Own in this run"),
        (Adam, partial(Adam, amsgrad=True), "optimizer's amsgrad is False in the checkpoint, but True in this run"),
        (SGD, partial(SGD, momentum=0.9), "optimizer's momentum is 0 in the checkpoint, but 0.9 in this run"),
        (partial(RMSprop, centered=True), RMSprop, "optimizer's centered is True in the checkpoint, but False in this"),
        (partial(SGD, momentum=0.8), partial(SGD, momentum=0.9), ""),
    ],
)
def test_another_optimizer_is_refused(tmp_path: Path, saved: Make, now: Make, said: str) -> None:
    assert train(tmp_path, saved, 1)[0] == ""
    error, same = train(tmp_path, now, 1)
    assert said in error
    assert error.endswith("Nothing was loaded.") == same == bool(said)


def test_options_that_decide_the_state_are_as_saved_if_that_is_forced(tmp_path: Path) -> None:
    train(tmp_path, SGD, 1)
    assert train(tmp_path, Own, 1, force=True) == ("", False)
    assert train(tmp_path, partial(Own, momentum=0.9), 1, force=True) == ("", False)
    assert "optimizer's momentum is 0 in the checkpoint" in train(tmp_path, partial(Own, momentum=0.9), 1)[0]
    error, same = train(tmp_path, Adam, 1, force=True)
    assert "optimizer is an optimizer with dampening, momentum, nesterov in the checkpoint, but Adam" in error
    assert same


@pytest.mark.parametrize("backend", ["ddp", pytest.param("fsdp", marks=pytest.mark.all("as ddp"))])
def test_every_rank_refuses_it(tmp_path: Path, backend: Any) -> None:
    run_ranks(train, tmp_path, SGD, 1, backend)
    said = "optimizer is SGD in the checkpoint, but Adam in this run"
    for error, same in run_ranks(train, tmp_path, Adam, 1, backend):
        assert said in error
        assert same


def moments(folder: Path, *numbers: int, groups: bool) -> list[Tensor]:
    """Resume, or train and save, with an optimizer of layers in an order. Return Adam's state of each layer."""
    with unitrain.init(backend="single", device="cpu") as strategy:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        weights = [p for n in numbers for p in model[n].parameters()]
        model, optimizer = strategy.prepare(model, Adam([{"params": [p]} for p in weights] if groups else weights))
        checkpoint = strategy.checkpoint(folder, background=False, model=model, optimizer=optimizer)
        if not checkpoint.resume():
            strategy.step(model(torch.ones(1, 2)).square().sum(), optimizer)
            checkpoint.save()
        return [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]


def test_the_state_goes_to_the_parameter_of_its_name(tmp_path: Path) -> None:
    saved, resumed = (moments(tmp_path / "a", *order, groups=False) for order in ((0, 1), (1, 0)))
    assert all(map(torch.equal, saved, resumed))
    assert not torch.equal(*saved)
    moments(tmp_path / "b", 0, 1, groups=True)
    with pytest.raises(CheckpointError, match=r"optimizer has 1\.weight in this run, but not in the same parameter gr"):
        moments(tmp_path / "b", 1, 0, groups=True)
