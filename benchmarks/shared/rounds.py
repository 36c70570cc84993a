"""Ways to do one thing, timed in rounds that take turns within one process, and compared round by round.

Separate processes differ by ±30 % on a small machine, and its moods last for seconds. Ways that take turns share both.
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

    The order turns from round to round, so that none is always the first. One more round, the first, warms up.

    Args:
        ways: what is timed, by name.
        rounds: how many.
        before: runs before each, untimed: a barrier, say.
        clock: in seconds.
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


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[bool, str]]:
    """Yield whether a turn counts (the first round warms up), and whose it is."""
    for round_ in range(-1, rounds):
        first = round_ % len(names)
        for name in [*names[first:], *names[:first]]:
            yield round_ >= 0, name


def compared(seconds: Mapping[str, Sequence[float]], base: str, units: int = 1) -> dict[str, dict[str, Any]]:
    """Compare each way with the one called ``base``, round by round.

    Args:
        seconds: what ``alternate`` returned.
        base: whose seconds the others are divided by.
        units: how many steps, say, one round does; the times are of one.

    Returns:
        For each way the median seconds of one unit, how many seconds it takes over the base (the median of the rounds'
        differences), and the median and the quartiles of the rounds' ratios.
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
    """Whether one is slower than the base by more than the base is slower than its own copy, ``control``."""
    return bool(one["ratio_quartiles"][0] > max(1.0, control["ratio_quartiles"][1]))


def shown_ratio(one: Mapping[str, Any]) -> str:
    """Return a ratio with its quartiles, for a table."""
    low, high = one["ratio_quartiles"]
    return f"{one['ratio']:.3f} ({low:.3f} to {high:.3f})"
