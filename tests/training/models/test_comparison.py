"""Ranks that prepare different models or optimizers: refused on every rank, with what differs and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import nn
from torch.optim import SGD, Adam, AdamW

import unitrain
from unitrain import CommunicationError

WORLDS = [("ddp", 3), pytest.param("horovod", 2, marks=HOROVOD)]


MODELS: dict[str, tuple[Any, Any, str]] = {
    "frozen": (
        lambda: nn.Linear(2, 1),
        lambda: nn.Linear(2, 1).requires_grad_(False),
        "tensor 0 is weight (1, 2) float32 requires_grad=True on rank {same}; weight (1, 2) float32 "
        "requires_grad=False on rank {odd}. Build the same model on every rank, and freeze the same layers.",
    ),
    "fewer": (
        lambda: nn.Linear(2, 1),
        lambda: nn.Linear(2, 1, bias=False),
        "tensor 1 is bias (1,) float32 requires_grad=True on rank {same}; missing on rank {odd}. ",
    ),
    "shape": (
        lambda: nn.Linear(2, 1),
        lambda: nn.Linear(3, 1).half(),
        "tensor 0 is weight (1, 2) float32 requires_grad=True on rank {same}; weight (1, 3) float16 ",
    ),
    "order": (
        lambda: nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)}),
        lambda: nn.ModuleDict({"b": nn.Linear(1, 1, bias=False), "a": nn.Linear(1, 1, bias=False)}),
        "tensor 0 is a.weight (1, 1) float32 requires_grad=True on rank {same}; b.weight ",
    ),
}
OPTIMIZERS: dict[str, tuple[Any, Any, str]] = {
    "lr": (
        lambda model: SGD(model.parameters(), lr=0.1),
        lambda model: SGD(model.parameters(), lr=0.2),
        "lr of parameter group 0 is 0.1 on rank {same}; 0.2 on rank {odd}. Make the same optimizer",
    ),
    "lr as a tensor": (
        lambda model: SGD(model.parameters(), lr=torch.tensor(0.5)),
        lambda model: SGD(model.parameters(), lr=torch.tensor(0.25)),
        "lr of parameter group 0 is 0.5 on rank {same}; 0.25 on rank {odd}.",
    ),
    "groups": (
        lambda model: SGD([{"params": [p]} for p in model.parameters()], lr=0.1),
        lambda model: SGD(model.parameters(), lr=0.1),
        "parameter 0 of parameter group 1 is bias on rank {same}; missing on rank {odd}.",
    ),
    "order": (
        lambda model: SGD(model.parameters(), lr=0.1),
        lambda model: SGD(list(model.parameters())[::-1], lr=0.1),
        "parameter 0 of parameter group 0 is weight on rank {same}; bias on rank {odd}.",
    ),
    "class": (
        lambda model: Adam(model.parameters()),
        lambda model: AdamW(model.parameters()),
        "the class is Adam on rank {same}; AdamW on rank {odd}.",
    ),
}


CASES = [*(("models", *each) for each in MODELS.items()), *(("optimizers", *each) for each in OPTIMIZERS.items())]


def prepare_apart(backend: str) -> list[str]:
    """Return what was said of each case, and that communication works afterwards."""
    said = []
    with unitrain.init(backend=backend, device="cpu") as strategy:
        odd = strategy.rank == strategy.world_size - 1
        for kind, _, case in CASES:
            make = case[1] if odd else case[0]
            model = nn.Linear(2, 1)
            given: tuple[Any, ...] = (make(),) if kind == "models" else (model, make(model))
            with pytest.raises(CommunicationError) as refused:
                strategy.prepare(*given)
            said.append(str(refused.value))
        assert float(strategy.all_reduce(torch.ones(()))) == strategy.world_size
    return said


@pytest.mark.parametrize(("backend", "world"), WORLDS)
def test_what_differs_is_named_with_its_values_and_ranks(backend: str, world: int) -> None:
    first, *others = run_ranks(prepare_apart, backend, nprocs=world)
    assert all(said == first for said in others)
    places = {"same": ", ".join(map(str, range(world - 1))), "odd": world - 1}
    for message, (kind, name, case) in zip(first, CASES, strict=True):
        assert message.startswith(f"the {kind} of the ranks differ: {case[2].format(**places)}"), name


def load_on_rank_0() -> tuple[float, list[float]]:
    """Prepare an optimizer whose state was loaded on rank 0 only, and return its options and state."""
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        model = nn.Linear(2, 1, bias=False)
        optimizer = Adam(model.parameters(), lr=0.1 if strategy.is_main else 0.2)
        if strategy.is_main:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        model, optimizer = strategy.prepare(model, optimizer)
        (state,) = optimizer.state.values()
        return optimizer.param_groups[0]["lr"], [float(state["step"]), *state["exp_avg"].flatten().tolist()]


def test_with_rank_0_s_state_come_its_options() -> None:
    first, second = run_ranks(load_on_rank_0)
    assert first == second
    assert first[0] == 0.1
    assert first[1] == pytest.approx([1.0, 0.1, 0.1])
