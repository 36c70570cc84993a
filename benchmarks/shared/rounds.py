"""Times alternatives in rounds, in turns within one process, and compares them round by round.

On a small machine, separate processes differ by ±30 %, and slow periods last for seconds. Ways that take turns in one
process share both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Way = Callable[[], object]
Seconds = dict[str, list[float]]


def alternate(
    ways: Mapping[str, Way],
    rounds: int,
    *,
    before: Way = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Seconds:
    """Return the seconds that each way took in each round.

    The order rotates from round to round, so that none is always first. An additional first round is for warm-up.

    Args:
        ways: the functions to time, by name.
        rounds: number of rounds.
        before: called before each way and not timed, such as a barrier.
        clock: returns the time in seconds.
    """
    seconds: Seconds = {name: [] for name in ways}
    for counts, name in turns(list(ways), rounds):
        before()
        start = clock()
        ways[name]()
        passed = clock() - start
        if counts:
            seconds[name].append(passed)
    return seconds


def repeat(way: Way, times: int) -> None:
    """Call a way several times, which count as one."""
    for _ in range(times):
        way()


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[bool, str]]:
    """Yield, for each turn, whether it counts (the first round is for warm-up), and the name of the way."""
    for round_ in range(-1, rounds):
        first = round_ % len(names)
        for name in [*names[first:], *names[:first]]:
            yield round_ >= 0, name


def compared(seconds: Mapping[str, Sequence[float]], base: str, units: int = 1) -> dict[str, dict[str, Any]]:
    """Compare each way with the one called ``base``, round by round.

    Args:
        seconds: the result of ``alternate``.
        base: the way to compare with.
        units: number of units, such as steps, per round. Times are divided by it.

    Returns:
        For each way, the median seconds per unit, the median difference to the base in seconds, and the median and
        quartiles of the rounds' ratios to the base.
    """
    found = {}
    for name, times in seconds.items():
        pairs = list(zip(seconds[base], times, strict=True))
        ratios = [one / its for its, one in pairs]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        found[name] = {
            "seconds": statistics.median(times) / units,
            "over_s": statistics.median(one - its for its, one in pairs) / units,
            "ratio": statistics.median(ratios),
            "ratio_quartiles": [low, high],
        }
    return found


def slower_beyond_spread(one: Mapping[str, Any], control: Mapping[str, Any]) -> bool:
    """Return whether a way is slower than the base by more than ``control``, a second copy of the base."""
    return bool(one["ratio_quartiles"][0] > max(1.0, control["ratio_quartiles"][1]))


def shown_ratio(one: Mapping[str, Any]) -> str:
    """Return a ratio with its quartiles, for a table."""
    low, high = one["ratio_quartiles"]
    return f"{one['ratio']:.2f} ({low:.2f}-{high:.2f})"
