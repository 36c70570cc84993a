"""Duties of training: every mode gives the same model as a plain loop on one device.

``unitrain verify`` has the same cases, plain loop and comparison. Results are not collected through the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from unitrain.testing.duty import duty
from unitrain.testing.parity import cases, comparison, plain, trial
from unitrain.testing.parity.cases import Case, Trace
from unitrain.testing.worlds import World

_EVERYTHING = {"accumulate": 2, "clip_norm": 0.05, "on_nonfinite": "raise"}
_STEPS = 8  # more than an epoch; unitrain verify trains for more, which takes longer
CASES = tuple(
    replace(case, steps=_STEPS)
    for case in (
        *cases.CASES,
        Case("fewer_samples_than_ranks", samples=21),
        Case("empty_micro_batches", {"accumulate": 4}, global_batch=5),
        Case("deterministic", {"deterministic": True, **cases.AS_ONE_DEVICE}, batch_norm=bool(cases.AS_ONE_DEVICE)),
        Case("everything", _EVERYTHING, weighted=True),
        Case("debug", {"accumulate": 2, "debug": True}, weighted=True),
        Case("fp32", {"precision": "fp32"}, tolerance=1e-5),
        Case("fp16_gradients", {"precision": "fp32", "compression": "fp16"}, tolerance=cases.FP16_TOLERANCE),
        Case("bf16_gradients", {"precision": "fp32", "compression": "bf16"}, tolerance=cases.BF16_TOLERANCE),
    )
)


@cache
def _expected() -> dict[str, Trace]:
    """Return the trace of the plain loop for each case."""
    return {case.name: plain.train(case) for case in CASES}


def judge(world: World, case: Case, ranks: Sequence[Trace]) -> None:
    """Compare the ranks' traces with the plain loop's.

    Args:
        world: the world that was trained.
        case: the case.
        ranks: the traces, by rank.

    Raises:
        AssertionError: they deviate. The message has each deviation.
    """
    verdict = comparison.compare(str(world), world.backend, case, _expected()[case.name], ranks)
    assert verdict.passed, str(verdict)
    # A backend that ignores the setting would pass every other check.
    if "compression" in case.settings:
        assert verdict.gradient > 1e-6, "the gradients were not rounded"


def _supports(world: World, case: Case) -> bool:
    """Return whether the backend has the compression that a case needs."""
    compression = case.settings.get("compression")
    return compression is None or (world.processes > 1 and compression in world.kind.compressions)


@duty(each={case.name: case for case in CASES}, needs=_supports, judge=judge)
def trains_as_one_device(world: World, case: Case) -> Trace:
    """Losses, gradients and weights are the same as in a plain loop on one device, and each sample is read once."""
    return trial.train(case, world.open)
