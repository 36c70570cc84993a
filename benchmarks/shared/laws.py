"""Finds out how a cost grows with the size of a job."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_LAWS: dict[str, Callable[[float], float]] = {
    "O(1)": lambda n: 0.0,
    "O(log n)": math.log,
    "O(n)": lambda n: n,
    "O(n log n)": lambda n: n * math.log(n),
    "O(n²)": lambda n: n * n,
}
AT_MOST_LINEAR = ("O(1)", "O(log n)", "O(n)")
# A law that needs fewer operations is preferred if its error is larger than the smallest by no more than this.
_NOISE = 0.1


def law(sizes: Sequence[int], costs: Sequence[float]) -> str:
    """Return the law that costs follow best, as a constant plus a multiple of it, by the relative errors."""
    if not any(costs):
        return "O(1)"
    errors = {name: _error([f(n) for n in sizes], costs) for name, f in _LAWS.items()}
    least = min(errors.values())
    return next(name for name, error in errors.items() if error <= least + _NOISE)


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return how a cost grows between the two largest sizes, as a power of the size."""
    return math.log(max(costs[-1], 1e-9) / max(costs[-2], 1e-9)) / math.log(sizes[-1] / sizes[-2])


def _error(growth: Sequence[float], costs: Sequence[float]) -> float:
    """Return the root mean square of the relative errors of the best ``a + b * growth`` with ``a`` and ``b`` from 0."""
    ones = [1 / cost for cost in costs]
    grows = [f / cost for f, cost in zip(growth, costs, strict=True)]
    candidates = [(_ratio(ones), 0.0), (0.0, _ratio(grows)), _both(ones, grows)]
    return min(
        math.sqrt(sum((a * one + b * f - 1) ** 2 for one, f in zip(ones, grows, strict=True)) / len(costs))
        for a, b in candidates
        if a >= 0 and b >= 0
    )


def _ratio(values: Sequence[float]) -> float:
    """Return the multiple of values that is closest to 1."""
    return sum(values) / (sum(value * value for value in values) or 1.0)


def _both(ones: Sequence[float], grows: Sequence[float]) -> tuple[float, float]:
    """Return the multiples of two series whose sum is closest to 1."""
    aa, bb = sum(one * one for one in ones), sum(f * f for f in grows)
    ab = sum(one * f for one, f in zip(ones, grows, strict=True))
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        return -1.0, -1.0
    return (sum(ones) * bb - sum(grows) * ab) / determinant, (sum(grows) * aa - sum(ones) * ab) / determinant
