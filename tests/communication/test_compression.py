"""Gradient compression: what is sent, which settings are errors, and models with weights in half precision."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from needs import HOROVOD
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import unitrain


def train(settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Tensor, set[torch.dtype]]:
    """Return the weights after a few steps, and in which types the strategy's own collectives summed gradients."""
    with unitrain.init(**settings) as strategy:
        ranks = strategy.communicator.collectives
        ranks.all_reduce_async = reduce = Mock(side_effect=ranks.all_reduce_async)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(2)).to(dtype)
        for _ in range(5):
            strategy.step(model(rows[strategy.rank :: strategy.world_size]).square().mean(), optimizer)
        sent = {call.args[0].dtype for call in reduce.call_args_list if call.args[2].startswith("gradients")}
        return torch.cat([p.detach().reshape(-1).float() for p in model.parameters()]), sent


@pytest.mark.parametrize(
    ("backend", "compression"),
    [
        ("ddp", "fp16"),
        ("ddp", "bf16"),
        pytest.param("horovod", "fp16", marks=HOROVOD),
    ],
)
def test_compressed_gradients_are_near_and_equal_on_all_ranks(backend: str, compression: str) -> None:
    plain, _ = train({"backend": "single"})
    settings = {"backend": backend, "compression": compression}
    (first, sent), (second, _) = run_ranks(train, settings)
    assert torch.equal(first, second)
    difference = (first - plain).abs().max()
    assert 0 < difference < 5e-3  # rounded, so not the same; and no more than rounded
    if backend == "horovod":
        assert sent == {torch.float16}


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=HOROVOD)])
def test_a_model_whose_own_weights_are_bf16_trains(backend: str) -> None:
    plain, _ = train({"backend": "single"}, torch.bfloat16)
    ranks = run_ranks(train, {"backend": backend}, torch.bfloat16)
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert (ranks[0][0] - plain).abs().max() < 2e-2


@HOROVOD
@pytest.mark.parametrize("compression", ["bf16", "powersgd"])
@on_ranks(launcher="horovodrun")
def test_what_horovod_cannot_send_is_refused(compression: Any) -> None:
    said = f"compression '{compression}' is not supported by backend 'horovod', which supports"
    with pytest.raises(unitrain.ConfigError, match=said):
        unitrain.init(backend="horovod", compression=compression)


def test_alone_there_is_nothing_to_compress() -> None:
    with pytest.warns(UserWarning, match="no effect with backend 'single': compression=fp16"):
        train({"backend": "single", "compression": "fp16"})


class Course(NamedTuple):
    """What became of a training: weights and losses after each step, and the bytes that its hook sent in it."""

    weights: list[Tensor]
    losses: list[float]
    sent: list[int]


def learn(settings: dict[str, Any], steps: int, shares: tuple[int, int] = (8, 8), rate: float = 0.05) -> Course:
    """Learn a linear map from rows of which each rank has so many."""
    with unitrain.init(**settings) as strategy:
        course, sent = Course([], [], []), 0
        reduce = dist.all_reduce

        def counting(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            nonlocal sent
            sent += tensor.nbytes if tensor.is_floating_point() else 0
            return reduce(tensor, *arguments, **keywords)

        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
        generator = torch.Generator().manual_seed(2)
        rows, truth = torch.randn(16, 64, generator=generator), torch.randn(64, 64, generator=generator) / 8
        first = shares[0] * strategy.rank
        own = rows if strategy.world_size == 1 else rows[first : first + shares[strategy.rank]]
        dist.all_reduce = counting
        try:
            for _ in range(steps):
                before = sent
                loss = (model(own) - own @ truth).square().sum(1).mean() if len(own) else model(own).sum()
                strategy.step(loss, optimizer, weight=len(own))
                mean = strategy.all_reduce(loss.detach() * len(own)) / len(rows)
                course.losses.append(mean.item())
                course.sent.append(sent - before)
                course.weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        finally:
            dist.all_reduce = reduce
        return course


def powersgd(start: int, rank: int = 2, **others: Any) -> dict[str, Any]:
    options = {"powersgd_start_step": start, "powersgd_rank": rank, **others}
    return {"backend": "ddp", "compression": "powersgd", "ddp": options}


@pytest.mark.parametrize("bucket_cap_mb", [25, 0.02], ids=["one bucket", "a bucket for each layer"])
def test_powersgd_is_exact_at_first_and_then_sends_less(bucket_cap_mb: float) -> None:
    plain, _ = run_ranks(learn, {"backend": "ddp"}, 5)
    first, second = run_ranks(learn, powersgd(5, bucket_cap_mb=bucket_cap_mb), 12)
    for step in range(5):
        assert torch.equal(first.weights[step], plain.weights[step])
    assert not torch.equal(first.weights[5] - first.weights[4], plain.weights[4] - plain.weights[3])
    assert all(torch.equal(one, other) for one, other in zip(first.weights, second.weights, strict=True))
    whole = 4 * len(first.weights[0])
    thin = 4 * (96 + 64 + 2 * 2 * (64 + 96))  # biases as they are, and two pairs of matrices of rank 2
    beside = first.sent[0] - whole  # what the step and this test sum besides
    assert [sent - beside for sent in first.sent] == [whole] * 5 + [thin] * 7
    assert thin < whole / 15


@pytest.mark.parametrize("shares", [(12, 4), (16, 0)])
def test_powersgd_averages_over_samples_however_they_are_shared(shares: tuple[int, int]) -> None:
    """With full rank nothing is lost, so that the gradient must be that of the mean over all rows."""
    alone = learn({"backend": "single"}, 6)
    options = powersgd(2, rank=64)
    first, second = run_ranks(learn_with_full_rank, options, 6, shares)
    assert torch.equal(first.weights[-1], second.weights[-1])
    assert torch.allclose(first.weights[-1], alone.weights[-1], rtol=1e-4, atol=1e-5)


def learn_with_full_rank(settings: dict[str, Any], steps: int, shares: tuple[int, int]) -> Course:
    # torch leaves matrices alone that would not become smaller, and of this rank none would.
    powerSGD_hook._should_compress = lambda rows, columns, rank, rate: (True, rows * columns, rank * (rows + columns))
    return learn(settings, steps, shares)


@on_ranks()
def test_all_ranks_see_through_powersgd_what_is_not_finite_on_one() -> None:
    with unitrain.init(**powersgd(2)) as strategy:
        model, optimizer = strategy.prepare(module := nn.Linear(64, 64), torch.optim.SGD(module.parameters(), lr=0.1))
        for step in range(5):
            rows = torch.ones(2, 64) if step < 4 or strategy.rank == 0 else torch.full((2, 64), float("nan"))
            with pytest.raises(unitrain.Stopped) if step == 4 else nullcontext():
                strategy.step(model(rows).square().mean(), optimizer)


@on_ranks()
def test_powersgd_of_nothing_is_nothing() -> None:
    with unitrain.init(**powersgd(2)) as strategy:
        model, optimizer = strategy.prepare(module := nn.Linear(64, 64), torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in range(5):
            strategy.step((0 * model(torch.ones(2, 64))).sum(), optimizer)
        assert all(torch.isfinite(p).all() for p in model.parameters())
