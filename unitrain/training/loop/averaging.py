"""Averages gradients over the ranks, and knows whether these have one model.

``Averaging`` is a process alone, which has nothing to average. ``GradientAveraging`` averages the gradients of several
ranks in every step: the backend does it, or the core's buckets. A feature that averages otherwise replaces it, and with
it ``Replicas``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import count
from weakref import ref

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.device import HALF_DTYPES, by_device
from unitrain.errors import UsageError
from unitrain.pulse import USER_CODE
from unitrain.training.gradients.gradients import GradientReducer
from unitrain.training.hooks import StepHook
from unitrain.training.loop.checks import CopyCheck
from unitrain.training.models.passes import ModulePass
from unitrain.training.windows.weights import Losses
from unitrain.training.windows.window import Window

WAITING = "step"  # phase of the pulse while gradients are averaged
Finish = Callable[[bool], None]
"""Completes the averaging of a step; see ``Backend.watch_gradients``."""


class Averaging(StepHook):
    """Averages no gradients: a process alone, or ranks that train apart for a while.

    If gradients are averaged in every step, it calls ``begin``, ``end`` and ``finish``, in this order and in the main
    thread. A single process is spared these calls, of which each costs as much as a small kernel.

    Args:
        unit: as the attribute.
        in_step: as the attribute.

    Attributes:
        in_step: whether gradients are averaged over the ranks in every step, so that all ranks step, or none.
        unit: divisor of the sum of the gradients over the ranks; the weights of losses make up for it.
    """

    place = 40

    def __init__(self, unit: int = 1, *, in_step: bool = False) -> None:
        self.unit: int = unit
        self.in_step: bool = in_step  # not of the class, where Python finds it more slowly: each step asks

    def expect(self, last: bool) -> None:
        """Prepare for a forward and backward that end a window if ``last``. Some backends must know so early."""

    def leave_to_script(self) -> None:
        """Average no gradients of backwards that are not between ``begin`` and ``end``: the script does. Collective."""

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

    def complete(self, window: Window) -> None:
        """Wait until the gradients are averaged if they are being so, since they are to be moved. Collective."""

    def close(self) -> None:
        """Remove hooks of parameters."""


class _Progress:
    """How far the averaging of an optimizer's gradients is.

    Attributes:
        finishers: complete it.
        reduced: whether the gradients of the last backward are being reduced, or have been.
        late: whether a library that must be armed before the forward can't have reduced some of them.
        trained: the parameters.
        done: finishers that have been called since the last backward, for an optimizer that shares them.
    """

    __slots__ = ("done", "finishers", "late", "reduced", "trained")

    def __init__(self) -> None:
        self.finishers: list[Finish] = []
        self.trained: Sequence[Parameter] = ()
        self.done: set[Finish] = set()
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
        copies: warns of ranks that train on the same data.
    """

    def __init__(
        self,
        communicator: Communicator,
        backend: Backend,
        config: StrategyConfig,
        passes: Sequence[ModulePass] = (),
    ) -> None:
        super().__init__(communicator.world_size if backend.gradient_reduction == "mean" else 1, in_step=True)
        self._backend = backend
        self._passes = passes
        self._collectives, self._sharding = communicator.collectives, communicator.sharding
        self._pulse = self._collectives.pulse
        self._accumulates = config.accumulate > 1
        self._wire_dtype = HALF_DTYPES.get(config.compression)
        self._finishers: dict[Parameter, Finish] = {}
        self._reducers: dict[Finish, GradientReducer] = {}
        self._numbers = count()
        self._known: set[tuple[Window, ...]] = set()  # windows that have shared a backward
        self._latest: list[Window] = []
        self._shares = False  # whether optimizers share parameters
        self.copies: CopyCheck = CopyCheck(communicator)
        self._progress: dict[ref[Optimizer], _Progress] = {}  # the same number on all ranks
        self.armed: bool = True
        self._left_to_script = False
        self.expect(not self._accumulates)

    def registered(self, optimizer: Optimizer) -> None:
        """Average an optimizer's gradients from now on."""
        self._progress[ref(optimizer)] = _Progress()

    def watched(self, optimizer: Optimizer, trained: Sequence[Parameter]) -> None:
        """Average the gradients of these parameters."""
        progress = self._progress[ref(optimizer)]
        # Frozen since the last micro-batch: what they have accumulated is averaged, too.
        frozen = [p for p in progress.trained if not p.requires_grad and self._sharding.leaf(p).grad is not None]
        if frozen and self._sharding.of_parameters:
            raise UsageError(
                f"a parameter of shape {tuple(frozen[0].shape)} was frozen within an accumulation window, when the "
                "gradients of its other micro-batches are not averaged yet: freeze layers between two steps."
            )
        progress.trained = [*trained, *frozen]
        self.finishers(progress.trained)
        self._follow()

    def keep(self, optimizers: Sequence[Optimizer], parameters: Collection[Parameter]) -> None:
        """Forget other optimizers, and the buckets of other parameters."""
        self._progress = {ref(optimizer): self._progress[ref(optimizer)] for optimizer in optimizers}
        for progress in self._progress.values():
            progress.trained = [p for p in progress.trained if p in parameters]
        self._finishers = {p: finish for p, finish in self._finishers.items() if p in parameters}
        for finish in [each for each, reducer in self._reducers.items() if reducer.parameters.isdisjoint(parameters)]:
            self._reducers.pop(finish).close()  # torch does not free parameters with hooks that refer to them
        self._follow()

    def finishers(self, parameters: Sequence[Parameter]) -> list[Finish]:
        """Return the functions that complete the averaging of these parameters' gradients, watched from now on.

        Each is of these parameters only: those that were watched together with others are now watched apart, if an
        optimizer trains the others.
        """
        wanted = set(parameters)
        others = {p for progress in self._progress.values() for p in progress.trained} - wanted
        for finish in dict.fromkeys(self._finishers[p] for p in parameters if p in self._finishers):
            group = [p for p, of_group in self._finishers.items() if of_group is finish]
            if not wanted.issuperset(group):
                self._watch([p for p in group if p in wanted])
                self._watch([p for p in group if p in others])
                for p in set(group) - wanted - others:
                    del self._finishers[p]
        self._watch([p for p in parameters if p not in self._finishers])
        return list(dict.fromkeys(self._finishers[p] for p in parameters))

    def _watch(self, parameters: Sequence[Parameter]) -> None:
        """Average the gradients of these parameters together from now on, and no longer with others. Collective."""
        if not parameters:
            return
        for old in {self._finishers[p] for p in parameters if p in self._finishers}:
            for progress in self._progress.values():
                if progress.reduced and old in progress.finishers:
                    self._finish_once(old, progress)
            if old in self._reducers:
                self._reducers.pop(old).close()
        frozen = [p for p in parameters if not p.requires_grad]  # for now: torch takes no hooks of theirs
        for p in frozen:
            p.requires_grad_(True)
        finish = self._backend.watch_gradients(parameters) or self._bucketed(parameters)
        for p in frozen:
            p.requires_grad_(False)
            self._sharding.leaf(p)  # follows
        self._finishers.update(dict.fromkeys(parameters, finish))
        for progress in self._progress.values():
            if progress.reduced and not set(parameters).isdisjoint(progress.trained):
                progress.done.add(finish)

    def _follow(self) -> None:
        """Follow a change of the functions that complete the averaging."""
        for progress in self._progress.values():
            progress.finishers = list(dict.fromkeys(self._finishers[p] for p in progress.trained))
        every = [finish for progress in self._progress.values() for finish in progress.finishers]
        self._shares = len(every) > len(set(every))
        self._latest, self._known = [], set()

    def _bucketed(self, parameters: Sequence[Parameter]) -> Finish:
        reducer = GradientReducer(
            parameters,
            self._collectives,
            armed=lambda parameter: self.armed,
            name=f"gradients.{next(self._numbers)}",
            wire_dtype=self._wire_dtype,
            divisor=self.unit,
        )

        def finish(late: bool) -> None:
            reducer.finish()

        self._reducers[finish] = reducer
        return finish

    def _prepare_for(self, windows: list[Window]) -> None:
        """Prepare for the first backward that these windows share, or without windows for the script's. Collective."""
        self._latest = windows
        if tuple(windows) in self._known:
            return
        if self._backend.expect_gradients({p for window in windows for p in window.trained}):
            for group in dict.fromkeys(self._finishers.values()):
                self._watch([p for p, finish in self._finishers.items() if finish is group])
            self._follow()
            self._latest = windows
        self._known.add(tuple(windows))
        finishers = {finish for window in windows for finish in self._progress[window.reference].finishers}
        if not self._backend.matches_by_name:
            # Libraries that match calls by order would confuse buckets with other buckets, or collectives of layers.
            alone = len(finishers) == 1 and not any(each.communicates for each in self._passes)
            for finish in finishers & self._reducers.keys():
                self._reducers[finish].overlap &= alone

    def leave_to_script(self) -> None:
        """Average no gradients of backwards that are not between ``begin`` and ``end``: the script does. Collective."""
        if not self._left_to_script:
            self._left_to_script = True
            self._prepare_for([])
            self.expect(last=False)

    def expect(self, last: bool) -> None:
        """Let the next backward communicate if ``last``. Some backends need this before the forward."""
        last = last and not self._left_to_script
        if last != self.armed:
            self._arm(last)

    def _arm(self, last: bool) -> None:
        self.armed = last
        self._backend.arm(last)

    def begin(self, losses: Losses, windows: list[Window], last: bool) -> None:
        """Check that all ranks are in the same call, and train on other samples."""
        if windows != self._latest:
            self._prepare_for(windows)
        for window in windows:
            self._enter(window, windows, last)
        if last != self.armed:
            self._arm(last)  # the core's buckets can still be armed here
        self._pulse.phase = WAITING  # a rank whose backward never ends would be reported by it
        if not last:
            return
        if self._collectives.compares:
            several = f" of {len(losses.each)} losses" if len(losses.each) > 1 else ""
            names = " and ".join(window.name for window in windows)
            self._collectives.compare_calls(f"backward{several} for {names}")
        if self.copies.pending and windows[0].micro_batch is None:  # a loader shards, so there is nothing to check
            self.copies.compare(torch.stack([loss.detach() for loss in losses.each]))

    def _enter(self, window: Window, windows: list[Window], last: bool) -> None:
        """Prepare for another backward in a window."""
        progress = self._progress[window.reference]
        first = window.last is None  # of its micro-batch
        if not window.is_open:  # its first backward
            progress.reduced = progress.late = False
        elif progress.reduced and (self.unit == 1 or self._reducers):
            self._finish_all([each for each in windows if self._progress[each.reference].reduced])
        # Without a loader, windows of several optimizers end at different times: a forward may be armed for another.
        crossing = window.micro_batch is None and self._accumulates and len(self._progress) > 1
        if last and (crossing or not first or not self.armed):
            progress.late = True

    def _finish_all(self, windows: list[Window]) -> None:
        """Wait for gradients that have been averaged over the ranks, and will be again. Collective."""
        for window in windows:
            self.finish(window)
        if self.unit == 1:  # they have been summed, and will be summed again
            gradients = dict.fromkeys(p.grad for window in windows for p in window.parameters if p.grad is not None)
            for together in by_device([self._sharding.to_local(gradient) for gradient in gradients]):
                torch._foreach_mul_(together, 1 / self._collectives.world_size)

    def end(self, windows: list[Window], last: bool) -> None:
        """Record that gradients are being averaged, if they are."""
        for window in windows:
            progress = self._progress[window.reference]
            progress.reduced = last
            if progress.done:
                progress.done.clear()
        if last and self._reducers and not self._backend.matches_by_name:
            # Now, and not in finish: a rank without gradients would order the script's own collectives differently.
            for finish in dict.fromkeys(self._finishers[p] for window in windows for p in window.trained):
                if finish in self._reducers:
                    self._reducers[finish].start()
        self._pulse.phase = USER_CODE

    def finish(self, window: Window) -> None:
        """Wait until the gradients are averaged. Collective."""
        self._pulse.phase = WAITING
        progress = self._progress[window.reference]
        if progress.reduced:
            for finish in progress.finishers:
                if self._shares or progress.done:
                    self._finish_once(finish, progress)
                else:
                    finish(progress.late)
        progress.reduced = progress.late = False

    def _finish_once(self, finish: Finish, progress: _Progress) -> None:
        """Call a finisher unless it was called for an optimizer that shares it. Collective."""
        if finish not in progress.done:
            finish(progress.late)
            for each in self._progress.values():
                if each.reduced and finish in each.finishers:
                    each.done.add(finish)

    def complete(self, window: Window) -> None:
        """Wait until the gradients are averaged if they are being so, since they are to be moved. Collective."""
        progress = self._progress[window.reference]
        with self._pulse.within(WAITING):
            for finish in progress.finishers if progress.reduced else ():
                self._finish_once(finish, progress)

    def close(self) -> None:
        """Remove the hooks of the core's buckets."""
        for reducer in self._reducers.values():
            reducer.close()


class Replicas:
    """Knows whether the ranks' copies of a model are one model now. This class says so after every step.

    A feature that lets ranks train apart for a while replaces it by a subclass.

    Args:
        differ: as the attribute.

    Attributes:
        differ: why the weights differ between ranks after a step, as a clause; "" if they never do.
    """

    def __init__(self, differ: str = "") -> None:
        self.differ: str = differ  # not of the class, where Python finds it more slowly: each step asks

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

    def check(self, call: str) -> None:
        """Raise UsageError for a call that needs one model on all ranks, if they have several."""
