"""Warnings about losses that were scaled by hand, or are means over part of their targets."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy as bce
from torch.nn.functional import cross_entropy, mse_loss

import unitrain
from unitrain.data.order.sharding import MicroBatch
from unitrain.training.loop.loss_check import LossCheck

LABELS = torch.tensor([0, 1, 2, -100, 1])
LOGITS = torch.ones(5, 3)
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


def logits() -> Tensor:
    return torch.arange(15.0).reshape(5, 3).requires_grad_()


def messages(loss: Tensor, *, accumulate: int = 1, world: int = 1, weighted: bool = False) -> list[str]:
    check = LossCheck(accumulate, world)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(3):
            if step >= check.next_step:
                check.look(loss, step, weighted=weighted)
    return [str(one.message) for one in seen]


@pytest.mark.parametrize(
    ("loss", "settings", "said"),
    [
        (lambda: logits().mean() / 4, {"accumulate": 4}, "divided by 4, the setting accumulate"),
        (lambda: logits().mean() / 3, {"world": 3}, "divided by 3, the number of processes"),
        (lambda: logits().mean() * torch.tensor(65536.0), {}, "multiplied by 65536, as by a GradScaler"),
        (lambda: torch.GradScaler("cpu").scale(logits().mean()), {}, "multiplied by 65536, as by a GradScaler"),
        (lambda: cross_entropy(logits(), LABELS), {"world": 2}, r"a mean over 4, .* 5 targets \(some have ignore_i"),
        (lambda: mse_loss(logits(), LOGITS, reduction="sum"), {"world": 2}, "a sum over samples .* Divide the loss by"),
        (lambda: bce(logits().sigmoid(), LOGITS, reduction="sum") + logits().sum(), {"accumulate": 2}, "a sum over"),
        (
            lambda: cross_entropy(logits(), LABELS.abs() % 3, CLASS_WEIGHTS),
            {"world": 2},
            r"a mean over 10, .* 5 targets \(classes have weights\)",
        ),
        (
            lambda: cross_entropy(logits().reshape(1, 3, 5), LABELS.reshape(1, 5)),
            {"world": 2},
            "mean over 4, where the batch has 5 targets",
        ),
    ],
)  # fmt: skip
def test_a_loss_that_trains_another_model_is_warned_of_once(loss: Any, settings: dict[str, Any], said: str) -> None:
    [message] = messages(loss(), **settings)
    assert re.search(said, message), message


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (lambda: logits().mean() / 4, {}),
        (lambda: logits().mean() / 3, {"accumulate": 4, "world": 2}),
        (lambda: (logits().mean() + logits().sum()) / 4, {"accumulate": 4}),  # the mean of several losses
        (lambda: logits().mean() * 0.5, {"world": 2}),
        (lambda: logits().sum() / 4, {"accumulate": 4}),  # the mean over a batch of 4
        (lambda: mse_loss(logits(), logits().detach(), reduction="sum") / 2, {"world": 2}),
        (lambda: logits().mean() * torch.tensor(2.0, requires_grad=True), {"accumulate": 2}),
        (lambda: cross_entropy(logits(), LABELS), {}),
        (lambda: cross_entropy(logits(), LABELS), {"world": 2, "weighted": True}),
        (lambda: cross_entropy(logits(), LABELS, reduction="sum") / 5, {"world": 2}),
        (lambda: cross_entropy(logits(), LABELS.abs() % 3), {"world": 2, "accumulate": 2}),
        (lambda: mse_loss(logits(), logits().detach()), {"world": 2}),
        (lambda: logits().reshape(-1)[0], {"world": 2}),
        (lambda: mse_loss(logits(), LOGITS, reduction="sum"), {}),
        (lambda: mse_loss(logits(), LOGITS, reduction="sum"), {"world": 2, "weighted": True}),
        (lambda: mse_loss(logits(), LOGITS, reduction="sum") * 0.2, {"world": 2}),
        (lambda: mse_loss(logits()[:1], LOGITS[:1], reduction="sum"), {"world": 2}),  # of a single sample
    ],
)
def test_other_losses_are_not(loss: Any, settings: dict[str, Any]) -> None:
    assert messages(loss(), **settings) == []


def changing(make: Any, numbers: list[tuple[int, int]], accumulate: int = 1) -> list[str]:
    """Look at losses of micro-batches with these numbers of samples on this rank, and of something else."""
    check = LossCheck(accumulate, 2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step, (samples, number) in enumerate(numbers):
            micro_batch = MicroBatch(0, 2 * samples, samples, 2 * samples, step, True, True, False, True)
            if step >= check.next_step:
                check.look(make(number), step, weighted=False, micro_batch=micro_batch)
    return [str(warning.message) for warning in seen]


def of(number: int) -> Tensor:
    return torch.ones(number, requires_grad=True)


MEANS = {
    "readable samples": lambda n: mse_loss(of(n), torch.zeros(n)),
    "readable classes": lambda n: cross_entropy(of(3 * n).view(n, 3), torch.zeros(n).long()),
    "masked": lambda n: (of(20) * (torch.arange(20) < n)).sum() / (torch.arange(20) < n).sum(),
    "masked, clamped": lambda n: 0.5 * (of(20) * 1.0).sum() / (torch.arange(20) < n).sum().clamp(min=1),
    "nodes": lambda n: 2 * of(n).square().mean() + 0.1 * of(7).square().mean(),
}


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_over_other_numbers_than_of_samples_is_warned_of(kind: str) -> None:
    [message] = changing(MEANS[kind], [(4, 3), (4, 4), (4, 3)])
    assert "the loss is a mean over 4 where this rank's batch has 4 samples, and over 3 for 4 earlier" in message


@pytest.mark.parametrize(
    ("make", "numbers", "accumulate"),
    [
        (MEANS["readable samples"], [(4, 4), (4, 4), (3, 3)], 2),
        (MEANS["readable samples"], [(4, 12), (4, 12), (3, 9)], 2),  # some elements of each
        (MEANS["readable samples"], [(4, 2), (4, 2), (2, 1)], 2),  # half of them
        (MEANS["readable samples"], [(4, 8), (3, 6), (2, 4)], 2),  # gathered
        (MEANS["readable samples"], [(4, 12), (4, 16), (4, 20)], 1),  # pixels of images of one size in each step
        (lambda n: of(n).mean() + of(7).square().mean(), [(4, 4), (3, 3), (2, 2)], 2),  # of parameters
        (lambda n: of(20).sum() / (n * 0.07), [(4, 4), (3, 3), (2, 2)], 2),
    ],
)
def test_means_in_proportion_to_the_samples_are_not(make: Any, numbers: Any, accumulate: int) -> None:
    assert changing(make, numbers, accumulate) == []


def test_few_steps_are_looked_at() -> None:
    check = LossCheck(1, 2)
    steps = []
    for step in range(20):
        if step >= check.next_step:
            steps.append(step)
            check.look(logits().mean(), step, weighted=False)
    assert steps == [0, 1, 2, 4, 8, 16]


def train_with_ignored_targets() -> list[str]:
    with unitrain.init(backend="ddp") as strategy, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model, optimizer = strategy.prepare(model := nn.Linear(3, 3), torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            strategy.step(cross_entropy(model(torch.randn(5, 3)), LABELS), optimizer)
    return [f"{one.filename}: {one.message}" for one in seen]


def test_the_script_s_line_is_shown() -> None:
    (message,), others = run_ranks(train_with_ignored_targets)
    assert message.startswith(f"{__file__}: the loss is a mean over 4")
    assert others == []


def train_on_padded_batches(numbers: list[list[int]]) -> list[str]:
    """Train on a mean over this many elements for each sample on each rank, as if batches were padded."""
    with unitrain.init(backend="ddp", timeout_s=30) as strategy, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        line = nn.Linear(1, 1)
        model, optimizer = strategy.prepare(line, torch.optim.SGD(line.parameters(), lr=0.1))
        for of_ranks in numbers:
            for rows in strategy.dataloader(torch.ones(9, 1), global_batch_size=3):  # two samples on rank 0
                elements = model(rows).expand(len(rows), of_ranks[strategy.rank])
                penalty = sum(
                    (weight.expand(5, 5) ** 2).mean() for weight in model.parameters()
                )  # a mean over no samples
                strategy.step(elements.square().mean() + 0.1 * penalty, optimizer)
    return [f"{one.filename}: {one.message}" for one in seen]


def test_ranks_with_means_over_another_number_for_each_sample_are_warned_of_once() -> None:
    (message,), others = run_ranks(train_on_padded_batches, [[8, 8], [12, 8], [8, 16]])
    assert message.startswith(
        f"{__file__}: the loss is a mean over 8 where rank 1's batch has 1 samples, and over 24 for 2 on rank 0: some"
    )
    assert others == []
    assert run_ranks(train_on_padded_batches, [[8, 8], [12, 12], [5, 5]]) == [[], []]
