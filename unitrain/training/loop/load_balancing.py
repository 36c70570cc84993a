"""Measures how fast each rank computes, and sets the shares of the ranks in proportion (``shares: auto``).

What is measured is the time from the moment at which a script gets a batch to its backward, without the time that
it waits for other ranks (in synchronised BatchNorm, or to gather rows). That is the script's own work, on the devices
as it uses them. The backward is left out, since ranks wait there for one another all the time. Once the shares are set,
nothing of this remains in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch

from unitrain.communication.communicator import Communicator
from unitrain.data.loop import Batches
from unitrain.data.order.shares import Shares, proportional
from unitrain.process import print_stderr
from unitrain.training.hooks import StepHook
from unitrain.training.loop.step import TrainingStep

# Steps. The first ones take longer: compilers, memory, DDP's buckets.
_SKIPPED = 5
_MEASURED = 10


class LoadBalancer(StepHook):
    """Measures some of the first steps of a run, and then sets the shares."""

    def __init__(self, communicator: Communicator, step: TrainingStep, shares: Shares) -> None:
        self._communicator = communicator
        self._step = step
        self._shares = shares
        self._steps = 0
        self._seen = step.global_step
        self._worked = 0.0  # on the batch that was yielded last, in seconds
        self._since: float | None = None  # when the script began to work on it, or went on; None: it does not
        self._seconds: list[float] = []  # for a sample of each measured batch

    def batches(self, batches: Batches) -> Batches:
        """Yield from an iterator of training batches, and measure what the script does with them."""
        for micro_batch, batch in batches:
            self._worked = 0.0
            self.after_call()
            yield micro_batch, batch
            if self._worked and micro_batch.count:
                self._seconds.append(self._worked / micro_batch.count)
            self._since = None  # what follows a step is not work on a batch
            if micro_batch.last and self._step.global_step != self._seen:
                self._seen = self._step.global_step
                self._steps += 1
                if self._steps == _SKIPPED:
                    self._communicator.pulse.around = self._waiting
                elif self._steps == _SKIPPED + _MEASURED:
                    self._settle()
            if self._steps >= _SKIPPED + _MEASURED:
                break
        yield from batches

    def before_call(self) -> None:
        """``backward`` or ``update`` was called: the script does not work on its batch until it returns."""
        if self._since is not None:
            self._worked += self._now() - self._since
            self._since = None

    def after_call(self) -> None:
        """It has returned. The script may go on to work on the batch, for another optimizer."""
        if self._steps >= _SKIPPED:
            self._since = self._now()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Context manager around a wait for other ranks, which is no work."""
        if self._since is None:
            yield
            return
        self.before_call()
        try:
            yield
        finally:
            self.after_call()

    def _now(self) -> float:
        if self._communicator.device.type != "cpu":
            torch.accelerator.synchronize(self._communicator.device)
        return perf_counter()

    def _settle(self) -> None:
        """Set the shares, unless the script takes batches ahead, as these have the old ones. Collective."""
        self._step.hooks.remove_hook(self)
        self._communicator.pulse.around = None
        ahead = self._step.batches.following is not None
        seconds = float(np.median(self._seconds)) if self._seconds else 0.0
        own = torch.tensor(seconds, dtype=torch.float64, device=self._communicator.device)
        everyone: list[float] = self._communicator.all_gather_alike(own).tolist()
        if min(everyone) > 0 and not ahead:
            self._shares.current = proportional([1 / seconds for seconds in everyone])
        if self._communicator.is_main:
            print_stderr(f"unitrain: {_report(self._shares.current, everyone, ahead=ahead)}")


def _report(shares: tuple[int, ...], seconds: list[float], *, ahead: bool) -> str:
    """Return a line on the shares and what they follow from: the seconds for a sample, by rank."""
    ratio = ":".join(map(str, shares))
    if ahead:
        return f"shares: {ratio}, since the script takes batches ahead of their steps: set shares to a list instead"
    if min(seconds) <= 0:
        return f"shares: {ratio}, since no work on a batch was seen on rank {seconds.index(min(seconds))}"
    slowest, fastest = 1 / max(seconds), 1 / min(seconds)
    return (
        f"shares: {ratio}, from {_MEASURED} steps: up to the backward, the ranks process {slowest:,.4g} to "
        f"{fastest:,.4g} samples per second"
    )
