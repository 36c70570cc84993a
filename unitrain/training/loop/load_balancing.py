"""Measures how fast each rank computes, and sets the shares of the ranks in proportion (``shares: auto``).

What is measured is the time from the moment at which a script gets a batch to its backward, without the time in which
it waits for other ranks (in synchronised BatchNorm, or to gather rows). That is the script's own work, on the devices
as it uses them. The backward is left out, since ranks wait there for one another all the time. Once the shares are set,
nothing of this remains in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch

from unitrain.communication.communicator import Communicator
from unitrain.data.loop import Batches
from unitrain.data.order.sharding import MicroBatch
from unitrain.data.order.shares import Shares, proportional
from unitrain.process import print_stderr
from unitrain.training.hooks import StepHook
from unitrain.training.loop.step import TrainingStep

# Steps. The first ones take longer: compilers, memory, DDP's buckets.
_SKIPPED = 5
_MEASURED = 10

T = TypeVar("T")


@dataclass
class _Work:
    """What a script did with one batch before its backward: pairs of times, or of events in a GPU's stream."""

    samples: int
    spans: list[tuple[Any, Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    """Those parts of the spans in which it waited for other ranks."""

    def per_sample(self) -> float:
        """Return the seconds of work for a sample."""
        worked, waited = (sum(_seconds(*pair) for pair in pairs) for pairs in (self.spans, self.waits))
        return (worked - waited) / self.samples


class LoadBalancer(StepHook):
    """Measures some of the first steps of a run, and then sets the shares.

    Args:
        communicator: the communicator of this process.
        step: the training step.
        shares: the shares to set.

    """

    def __init__(self, communicator: Communicator, step: TrainingStep, shares: Shares) -> None:
        self._communicator = communicator
        self._step = step
        self._shares = shares
        self._now: Callable[[], Any] = _event if communicator.device.type == "cuda" else perf_counter
        self._steps = 0
        self._seen = step.global_step
        self._work: _Work | None = None  # on the batch that was yielded last, if it is measured
        self._since: Any = None  # when the present span began
        self._done: list[_Work] = []
        self._measuring = True

    def batches(self, batches: Batches) -> Batches:
        """Yield from an iterator of training batches, and measure what the script does with them."""
        for micro_batch, batch in batches:
            if self._measuring:
                self._begin(micro_batch)
            yield micro_batch, batch
            if self._measuring:
                self._end(micro_batch)
            if not self._measuring:
                break
        yield from batches

    def _begin(self, micro_batch: MicroBatch) -> None:
        if self._steps < _SKIPPED or not micro_batch.count:
            return
        if not self._done and self._work is None:  # the first one
            self._communicator.call_around_waits(self._timed)
        self._work = _Work(micro_batch.count)
        self._since = self._now()

    def _end(self, micro_batch: MicroBatch) -> None:
        if self._work is not None:
            # What follows a step is not work on a batch, unless the next one is taken ahead of the step.
            if self._step.batches.following is not None:
                self.before_call()
            self._done.append(self._work)
            self._work = self._since = None
        if micro_batch.last and self._step.global_step != self._seen:
            self._seen = self._step.global_step
            self._steps += 1
            if self._steps == _SKIPPED + _MEASURED:
                self._settle()

    def before_call(self) -> None:
        """``backward`` or ``update`` was called: a span ends."""
        if self._work is not None and self._since is not None:
            self._work.spans.append((self._since, self._now()))
            self._since = None

    def after_call(self) -> None:
        """It has returned. The script may go on to work on the batch, for another optimizer."""
        if self._work is not None:
            self._since = self._now()

    def _timed(self, wait: Callable[[], T]) -> T:
        """Wait for a collective, and note when."""
        if self._work is None or self._since is None:
            return wait()
        before = self._now()
        result = wait()
        self._work.waits.append((before, self._now()))
        return result

    def _settle(self) -> None:
        """Set the shares. Collective."""
        self._measuring = False
        self._step.hooks.remove_hook(self)
        self._communicator.call_around_waits(None)
        device = self._communicator.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = float(np.median([work.per_sample() for work in self._done])) if self._done else 0.0
        self._done.clear()
        own = torch.tensor(seconds, dtype=torch.float64, device=device)
        everyone: list[float] = self._communicator.all_gather_alike(own).tolist()
        if min(everyone) > 0:
            self._shares.current = proportional([1 / seconds for seconds in everyone])
        if self._communicator.is_main:
            print_stderr(f"unitrain: {_report(self._shares.current, everyone)}")


def _report(shares: tuple[int, ...], seconds: list[float]) -> str:
    """Return a line on the shares and what they follow from: the seconds for a sample, by rank."""
    ratio = ":".join(map(str, shares))
    if min(seconds) <= 0:
        return f"shares: {ratio}, since no work on a batch was seen on rank {seconds.index(min(seconds))}"
    slowest, fastest = 1 / max(seconds), 1 / min(seconds)
    return (
        f"shares: {ratio}, from {_MEASURED} steps: up to the backward, the ranks process {slowest:,.4g} to "
        f"{fastest:,.4g} samples per second"
    )


def _event() -> torch.cuda.Event:
    """Return an event recorded in the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(before: Any, after: Any) -> float:
    return float(after - before if isinstance(before, float) else before.elapsed_time(after) / 1000)
