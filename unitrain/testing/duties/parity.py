"""Duties of training: every mode gives the same model as a plain loop on one device.

``unitrain verify`` has the same cases, plain loop and comparison. The backend is not used to collect the
results that are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.optim import SGD

from unitrain.commands.verify import cases, comparison, plain, trial
from unitrain.commands.verify.cases import Case
from unitrain.commands.verify.trace import Trace
from unitrain.testing.duty import duty
from unitrain.testing.models import assert_bit_equal_on_all_ranks, whole
from unitrain.testing.ranks import run_ranks
from unitrain.testing.worlds import World

_EVERYTHING = {"accumulate": 2, "clip_norm": 0.05, "clip_value": 0.02, "on_nonfinite": "raise"}
_STEPS = 8  # more than an epoch; unitrain verify trains for more, which takes longer
CASES = tuple(
    replace(case, steps=_STEPS)
    for case in (
        *cases.CASES,
        Case("fewer_samples_than_ranks", samples=21),
        Case("empty_micro_batches", {"accumulate": 4}, global_batch=5),
        Case("deterministic", {"deterministic": True, "sync_batchnorm": True}, batch_norm=True),
        Case("everything", _EVERYTHING, weighted=True),
        Case("debug", {"accumulate": 2, "debug": True}, weighted=True),
    )
)


def _train_plainly() -> dict[str, Trace]:
    return {case.name: plain.train(case) for case in CASES}


@cache
def _expected() -> dict[str, Trace]:
    """Return the traces of the plain loops. They run in a forked process, which need not import torch's compiler."""
    [traces] = run_ranks(_train_plainly, nprocs=1, launcher="python")
    return dict(traces)


def judge(world: World, case: Case, ranks: Sequence[Trace]) -> None:
    """Compare the ranks' traces with the plain loop's."""
    verdict = comparison.compare(str(world), world.backend, case, _expected()[case.name], ranks)
    assert verdict.passed, str(verdict)


@duty(each={case.name: case for case in CASES}, judge=judge)
def trains_as_one_device(world: World, case: Case) -> Trace:
    """Losses, gradients and weights are the same as in a plain loop on one device, and each sample is read once."""
    _, trace = trial.train(case, world.open)
    return trace


def _train_compressed(world: World, compression: str) -> None:
    """Train in float32 with compressed gradients, and compare with training on one device."""
    with world.open(precision="fp32", compression=compression) as strategy:
        model, expected = _wide_net(), _wide_net()
        prepared, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
        by_hand = SGD(expected.parameters(), lr=0.1)
        rows = torch.randn(4 * strategy.world_size, 6, generator=torch.Generator().manual_seed(2))
        for _ in range(5):
            strategy.step(prepared(rows[strategy.rank :: strategy.world_size]).square().mean(), optimizer)
            by_hand.zero_grad()
            expected(rows).square().mean().backward()
            by_hand.step()
        difference = max(
            _largest(whole(p.detach()) - q) for p, q in zip(model.parameters(), expected.parameters(), strict=True)
        )
        assert 0 < difference < 5e-3, f"weights differ by {difference}, but must differ by rounding, and by no more"
        assert_bit_equal_on_all_ranks(strategy, model)


def _wide_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


@duty(needs=lambda world: world.processes > 1 and "fp16" in world.kind.compressions)
def trains_with_gradients_in_fp16(world: World) -> None:
    """With compression fp16, gradients are rounded to fp16, and equal on all ranks."""
    _train_compressed(world, "fp16")


@duty(needs=lambda world: world.processes > 1 and "bf16" in world.kind.compressions)
def trains_with_gradients_in_bf16(world: World) -> None:
    """With compression bf16, gradients are rounded to bf16, and equal on all ranks."""
    _train_compressed(world, "bf16")
