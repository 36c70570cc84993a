"""The search: measures every world, then tunes one setting after the other in the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from unitrain.commands.bench.candidates import LOSSY, Candidate, levers_of
from unitrain.commands.bench.measuring import Measurement
from unitrain.commands.verify.worlds import World

Measure = Callable[[Candidate], Measurement]


def fastest(measurements: Sequence[Measurement]) -> Measurement:
    """Return the measurement with the most samples per second."""
    return max(measurements, key=lambda measurement: measurement.samples_per_second)


def try_worlds(worlds: Sequence[World], measure: Measure) -> Iterator[Measurement]:
    """Yield a measurement of each world with the settings of the recipe."""
    for world in worlds:
        yield measure(Candidate(world))


class Levers:
    """Tunes settings of a candidate, one after the other, and keeps those that make it faster.

    Two runs of the same candidate differ by more than most settings gain. So a setting that seems to help is measured
    again, and so is the best candidate without it. It is kept only if the slower of its runs is faster than the faster
    run without it.

    Args:
        base: the measurement of the fastest world.
        names: the settings to tune.
        measure: measures a candidate.

    Attributes:
        best: the fastest measurement so far.
    """

    def __init__(self, base: Measurement, names: Sequence[str], measure: Measure) -> None:
        self.best: Measurement = base
        self._measure = measure
        self._tried = list(levers_of(base.candidate.world, names))

    def __len__(self) -> int:
        """Return the number of values to try."""
        return len(self._tried)

    def __iter__(self) -> Iterator[Measurement]:
        """Yield the measurement of each value."""
        for name, value in self._tried:
            found = self._measure(self.best.candidate.with_lever(name, value))
            yield found
            if name not in LOSSY and found.samples_per_second > self.best.samples_per_second:
                self._confirm(found)

    def _confirm(self, found: Measurement) -> None:
        again = [self._measure(self.best.candidate), self._measure(found.candidate)]
        without = fastest([self.best, again[0]])
        slower = min(found, again[1], key=lambda measurement: measurement.samples_per_second)
        if slower.samples_per_second > without.samples_per_second:
            self.best = slower
