"""Averages gradients over the ranks, and knows whether these have one model.

``Averaging`` is a process alone, which has nothing to average. ``GradientAveraging`` averages the gradients of several
ranks in every step: the backend does it, or the core's buckets. A feature that averages otherwise replaces it, and with
it ``Replicas``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.device import HALF_DTYPES, by_device
from unitrain.pulse import USER_CODE
from unitrain.training.gradients.gradients import GradientReducer
from unitrain.training.hooks import StepHook
from unitrain.training.loop.checks import CopyCheck
from unitrain.training.loop.weights import Losses
from unitrain.training.loop.window import Window
from unitrain.training.models.passes import ModulePass

WAITING = "step"  # phase of the pulse while gradients are averaged
Finish = Callable[[bool], None]
"""Completes the averaging of a step; see ``Backend.watch_gradients``."""


class Averaging(StepHook):
    """Averages no gradients: a process alone, or ranks that train apart for a while.

    The step calls the methods in this order. All run in the main thread, and cost a single process one empty call each.

    Args:
        unit: as the attribute.

    Attributes:
        in_step: whether gradients are averaged over the ranks in every step, so that all ranks step, or none.
        unit: divisor of the sum of the gradients over the ranks; the weights of losses make up for it.
    """

    place = 40
    in_step: bool = False

    def __init__(self, unit: int = 1) -> None:
        self.unit: int = unit

    def expect(self, last: bool) -> None:
        """Prepare for a forward and backward that end a window if ``last``. Some backends must know so early."""

    def begin(self, losses: Losses, windows: list[Window], last: bool) -> None:
        """Prepare for the backward of these losses, which ends the windows if ``last``: then this is collective.

        Args:
            losses: the losses, weighed.
            windows: of the optimizers whose parameters get gradients.
            last: whether the backward ends the windows.
        """

    def end(self, windows: list[Window], last: bool) -> None:
        """Record that the backward has ended."""

    def finish(self, window: Window) -> None:
        """Wait until the gradients are averaged, since the optimizer is about to step. Collective."""

    def close(self) -> None:
        """Remove hooks of parameters."""


class _Progress:
    """How far the averaging of an optimizer's gradients is.

    Attributes:
        finishers: complete it.
        reduced: whether the gradients of the last backward are being reduced, or have been.
        late: whether a library that must be armed before the forward can't have reduced some of them.
    """

    __slots__ = ("finishers", "late", "reduced")

    def __init__(self) -> None:
        self.finishers: list[Finish] = []
        self.reduced = self.late = False


class GradientAveraging(Averaging):
    """Averages gradients in every backward that ends a window.

    Args:
        communicator: of this process.
        backend: averages gradients itself, or leaves them to the core's buckets.
        config: the settings.
        passes: changes that ``prepare`` makes to modules; the list may grow until the first step.

    Attributes:
        armed: whether the next backward communicates.
    """

    in_step = True

    def __init__(
        self,
        communicator: Communicator,
        backend: Backend,
        config: StrategyConfig,
        passes: Sequence[ModulePass] = (),
    ) -> None:
        super().__init__(communicator.world_size if backend.gradient_reduction == "mean" else 1)
        self._backend = backend
        self._passes = passes
        self._collectives, self._sharding = communicator.collectives, communicator.sharding
        self._pulse = self._collectives.pulse
        self._accumulates = config.accumulate > 1
        self._wire_dtype = HALF_DTYPES.get(config.compression)
        self._finishers: dict[Parameter, Finish] = {}
        self._reducers: list[GradientReducer] = []
        self._copies = CopyCheck(communicator)
        self._progress: dict[int, _Progress] = {}  # by the id of the optimizer
        self._optimizers = 0  # the same number on all ranks
        self._buckets = 0  # reducers ever made
        self.armed: bool = True
        self.expect(not self._accumulates)

    def registered(self, optimizer: Optimizer) -> None:
        """Average an optimizer's gradients from now on."""
        self._progress[id(optimizer)] = _Progress()
        self._optimizers += 1

    def watched(self, optimizer: Optimizer, trained: Sequence[Parameter]) -> None:
        """Average the gradients of these parameters."""
        self._progress[id(optimizer)].finishers = self.finishers(trained)

    def keep(self, optimizers: Sequence[Optimizer], parameters: Collection[Parameter]) -> None:
        """Forget other optimizers, and the buckets of other parameters."""
        self._progress = {id(optimizer): self._progress[id(optimizer)] for optimizer in optimizers}
        self._optimizers = len(optimizers)
        self._finishers = {p: finish for p, finish in self._finishers.items() if p in parameters}
        for reducer in [each for each in self._reducers if each.parameters.isdisjoint(parameters)]:
            reducer.close()  # torch does not free parameters with hooks that refer to them
            self._reducers.remove(reducer)

    def finishers(self, parameters: Sequence[Parameter]) -> list[Finish]:
        """Return the functions that complete the averaging of these parameters' gradients, watched from now on.

        Parameters that are watched already keep their function, so a function may belong to others as well.
        """
        new = [p for p in parameters if p not in self._finishers]
        if new:
            self._finishers.update(dict.fromkeys(new, self._backend.watch_gradients(new) or self._bucketed(new)))
        return list(dict.fromkeys(self._finishers[p] for p in parameters))

    def _bucketed(self, parameters: Sequence[Parameter]) -> Finish:
        # Libraries that match calls by order would confuse buckets with the collectives of layers.
        communicates = any(each.communicates for each in self._passes)
        reducer = GradientReducer(
            parameters,
            self._collectives,
            armed=lambda: self.armed,
            name=f"gradients.{self._buckets}",
            wire_dtype=self._wire_dtype,
            overlap=self._backend.matches_by_name or not communicates,
        )
        self._reducers.append(reducer)
        self._buckets += 1
        return lambda late: reducer.finish()

    def expect(self, last: bool) -> None:
        """Let the next backward communicate if ``last``. Some backends need this before the forward."""
        if last != self.armed:
            self.armed = last
            self._backend.arm(last)

    def begin(self, losses: Losses, windows: list[Window], last: bool) -> None:
        """Check that all ranks are in the same call, and train on other samples."""
        for window in windows:
            self._enter(window, last)
        self.expect(last)  # the core's buckets can still be armed here
        self._pulse.phase = WAITING  # a rank whose backward never ends would be reported by it
        if not last:
            return
        if self._collectives.compares:
            several = f" of {len(losses.each)} losses" if len(losses.each) > 1 else ""
            names = " and ".join(window.name for window in windows)
            self._collectives.compare_calls(f"backward{several} for {names}")
        if self._copies.pending and windows[0].micro_batch is None:  # a loader shards, so there is nothing to check
            self._copies.compare(torch.stack([loss.detach() for loss in losses.each]))

    def _enter(self, window: Window, last: bool) -> None:
        """Prepare for another backward in a window."""
        progress = self._progress[window.key]
        first = window.last is None  # of its micro-batch
        if not window.is_open:  # its first backward
            progress.reduced = progress.late = False
        elif progress.reduced and self.unit == 1:
            # These gradients have been summed over the ranks, and will be summed again.
            self.finish(window)
            gradients = [p.grad for p in window.parameters if p.grad is not None]
            for together in by_device([self._sharding.to_local(gradient) for gradient in gradients]):
                torch._foreach_mul_(together, 1 / self._collectives.world_size)
        # Without a loader, windows of several optimizers end at different times: a forward may be armed for another.
        crossing = window.micro_batch is None and self._accumulates and self._optimizers > 1
        if last and (crossing or not first or not self.armed):
            progress.late = True

    def end(self, windows: list[Window], last: bool) -> None:
        """Record that gradients are being averaged, if they are."""
        for window in windows:
            self._progress[window.key].reduced = last
        self._pulse.phase = USER_CODE

    def finish(self, window: Window) -> None:
        """Wait until the gradients are averaged. Collective."""
        self._pulse.phase = WAITING
        progress = self._progress[window.key]
        if progress.reduced:
            for finish in progress.finishers:
                finish(progress.late)
        progress.reduced = progress.late = False

    def close(self) -> None:
        """Remove the hooks of the core's buckets."""
        for reducer in self._reducers:
            reducer.close()


class Replicas:
    """Knows whether the ranks' copies of a model are one model now. This class says so after every step.

    A feature that lets ranks train apart for a while replaces it by a subclass.

    Attributes:
        differ: why the weights differ between ranks after a step, as a clause; "" if they never do.
    """

    differ: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the weights differ now, since the last step did not end with one model."""
        return False

    def end_step(self) -> bool:
        """Return whether the ranks have one model after this step, so that the run may stop here. Collective."""
        return True

    def end_epoch(self) -> bool:
        """Give all ranks one model, since the data have ended. Return whether they had several. Collective."""
        return False

    def shared_weights(self, call: str | None = None, *, buffers: bool = False) -> AbstractContextManager[None]:
        """Return a context manager in which the model has weights that all ranks share.

        Args:
            call: the call that needs them. UsageError is raised if there are none at this point.
            buffers: share buffers, too; the call is collective then.
        """
        return nullcontext()

    def check(self, call: str) -> None:
        """Raise UsageError for a call that needs one model on all ranks, if they have several."""
