"""What happens around the optimizer steps of a run: one list of hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.data.loop import Batches

BeforeUpdate = Callable[[Optimizer, Sequence[Parameter]], None]
AfterUpdate = Callable[[Optimizer, Sequence[Parameter], bool], None]
_MOMENTS = (
    "before_call", "after_call", "before_update", "after_update", "at_boundary", "at_epoch_end", "batches",
)  # fmt: skip


class StepHook:
    """Base class of what is notified around the steps of a run. A subclass overrides what it needs."""

    def before_call(self, call: str) -> None:
        """A call begins, ``backward`` or ``update``."""

    def after_call(self) -> None:
        """It has returned, or raised."""

    def before_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """An optimizer is about to change weights, unless its gradients turn out to be non-finite."""

    def after_update(self, optimizer: Optimizer, parameters: Sequence[Parameter], stepped: bool) -> None:
        """It has changed them if ``stepped``. The gradients are still there. The step does not count yet."""

    def at_boundary(self) -> None:
        """The run is between two steps, where it can be stopped."""

    def at_epoch_end(self) -> None:
        """A training iteration over a loader has ended."""

    def batches(self, batches: Batches) -> Batches:
        """Return an iterator that yields the batches of a training iteration, to measure it."""
        return batches


class Hooks:
    """The hooks of a run: for each moment, the methods of those that override it, in the order of the list.

    A moment without hooks thus costs a look at an empty list.
    """

    def __init__(self, *hooks: StepHook) -> None:
        self.before_call: list[Callable[[str], None]] = []
        self.after_call: list[Callable[[], None]] = []
        self.before_update: list[BeforeUpdate] = []
        self.after_update: list[AfterUpdate] = []
        self.at_boundary: list[Callable[[], None]] = []
        self.at_epoch_end: list[Callable[[], None]] = []
        self.batches: list[Callable[[Batches], Batches]] = []
        for hook in hooks:
            self.add_hook(hook)

    def add_hook(self, hook: StepHook) -> None:
        """Call a hook from now on, after those that are there."""
        for moment in _MOMENTS:
            if getattr(type(hook), moment) is not getattr(StepHook, moment):
                getattr(self, moment).append(getattr(hook, moment))

    def remove_hook(self, hook: StepHook) -> None:
        """Call a hook no more."""
        for moment in _MOMENTS:  # in new lists: a hook may remove itself while a list is gone through
            setattr(self, moment, [call for call in getattr(self, moment) if call.__self__ is not hook])

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Context manager around ``backward`` and ``update``."""
        for before in self.before_call:
            before(name)
        try:
            yield
        finally:
            for after in self.after_call:
                after()
