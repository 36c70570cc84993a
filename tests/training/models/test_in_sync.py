"""``check_in_sync`` and metrics, which are the same on all ranks."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import nn

import unitrain

WORLDS = [("ddp", 3), pytest.param("horovod", 2, marks=HOROVOD)]


DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def drift(backend: str) -> list[str]:
    said = []
    with unitrain.init(backend=backend) as strategy:
        for dtype in DTYPES:
            model = strategy.prepare(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(dtype))
            strategy.check_in_sync(model)
            state = strategy.unwrap(model).state_dict()
            state["1.running_mean"] += strategy.rank  # each rank's own, by design
            strategy.check_in_sync(model)
            with torch.no_grad():
                if strategy.rank == strategy.world_size - 1:
                    state["0.weight"][[0, 1]] = state["0.weight"][[1, 0]]  # the same numbers, elsewhere
            try:
                strategy.check_in_sync(model)
            except unitrain.CommunicationError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize(("backend", "world"), WORLDS)
def test_a_rank_that_drifted_is_named_on_every_rank(backend: str, world: int) -> None:
    first, *others = run_ranks(drift, backend, nprocs=world)
    assert len(first) == len(DTYPES)
    assert all(f"0.weight (4, 3) of rank {world - 1} is not that of rank 0" in said for said in first)
    assert all(said == first for said in others)


def drifting(change: str) -> str:
    """Train two epochs, of which the second one begins with ranks that differ. Return the error and its place."""
    with unitrain.init(backend="ddp") as strategy, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model, optimizer = strategy.prepare(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
        loader = strategy.dataloader(torch.utils.data.TensorDataset(torch.eye(8, 2)), global_batch_size=4)
        try:
            for epoch in loader.epochs(2):
                for (x,) in loader:
                    strategy.step(model(x).mean(), optimizer)
                    if strategy.rank == 1 and epoch == 0:
                        if change == "lr":
                            optimizer.param_groups[0]["lr"] = 0.2
                        else:
                            strategy.unwrap(model).state_dict()["bias"] += float(change)
        except unitrain.CommunicationError as error:
            return f"epoch {epoch}: {error}"
    return "; ".join(str(one.message) for one in seen)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("1", r"epoch 0: the ranks' models differ: bias \(1,\) of rank 1 is not that of rank 0\."),
        (
            "lr",
            r"epoch 0: the optimizers of the ranks differ: lr of parameter group 0 is 0\.1 on rank 0; 0\.2 on .*"
            r"and step a ReduceLROnPlateau with the same metric, as a meter's value\(\)\.$",
        ),
    ],
)
def test_ranks_that_drifted_apart_are_noticed_at_the_end_of_an_epoch(change: str, said: str) -> None:
    first, other = run_ranks(drifting, change)
    assert re.match(said, first), first
    assert other == first


def loading_on_one_rank(change: float) -> str:
    """Change a weight of rank 1 a little before the first step; return what is said after it."""
    strategy = unitrain.init(device="cpu")
    net = torch.nn.Linear(3, 1)
    model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with torch.no_grad():
        net.bias.add_(change * strategy.rank)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            strategy.step(model(torch.ones(2, 3) + strategy.rank).sum(), optimizer)
        except unitrain.CommunicationError as error:
            return str(error)
    return "; ".join(str(each.message) for each in seen)


def test_ranks_that_differ_are_noticed_after_the_first_step() -> None:
    """A difference that is small, but is no rounding."""
    first, other = run_ranks(loading_on_one_rank, 1e-4)
    assert first == other
    assert first.startswith("the ranks' models differ: bias (1,) of rank 1 is not that of rank 0.")


def test_a_first_step_that_is_rounded_differently_is_not_an_error() -> None:
    first, other = run_ranks(loading_on_one_rank, 3e-7)
    assert first.startswith("the ranks' models differ slightly: bias (1,) of rank 1")
    assert other == ""
