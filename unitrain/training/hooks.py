"""Hooks: objects that are notified around the optimizer steps of a run, in one list for each moment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.data.loop import Batches

BeforeUpdate = Callable[[Optimizer, Sequence[Parameter]], None]
AfterUpdate = Callable[[Optimizer, Sequence[Parameter], bool], None]
Watched = Callable[[Optimizer, Sequence[Parameter]], None]
_NOTHING = nullcontext()


class StepHook:
    """Receives notifications around the steps of a run. A subclass overrides the moments that it needs.

    All are called by the main thread of every rank, in the same order, so that they may communicate unless their
    docstring says otherwise. An exception that one raises ends the step, and is raised to the script.

    Attributes:
        place: the order among hooks. At each moment, those with a smaller number are called first, and hooks of one
            place in the order in which they were added. Division of an optimizer has 10, buffers 20, gradients 40,
            averages of weights and hooks of scripts 50, copies of the state 90.
        kept_in_checkpoints: what the hook is, such as "an average", if a run's checkpoints should have it as an object.
        of_checkpoint: whether it belongs to the open checkpoint, and so is not called within a trial.
    """

    place: int = 50
    kept_in_checkpoints: str = ""
    of_checkpoint: bool = False

    def registered(self, optimizer: Optimizer) -> None:
        """An optimizer is trained with from now on."""

    def watched(self, optimizer: Optimizer, trained: Sequence[Parameter]) -> None:
        """It trains these parameters from now on, and no others: they require gradients."""

    def keep(self, optimizers: Sequence[Optimizer], parameters: Collection[Parameter]) -> None:
        """The script has dropped all other optimizers and parameters that it trained with: forget them."""

    def before_call(self, call: str) -> None:
        """A call begins, ``backward`` or ``update``."""

    def after_call(self) -> None:
        """It has returned, or raised. Not collective: other ranks may not have raised."""

    def before_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """An optimizer is about to change weights, unless its gradients turn out to be non-finite.

        Args:
            optimizer: the optimizer. Its gradients are averaged and unscaled, but not clipped yet.
            parameters: all of its parameters, of all groups.
        """

    def after_update(self, optimizer: Optimizer, parameters: Sequence[Parameter], stepped: bool) -> None:
        """It has changed them if ``stepped``. The gradients are still there. The step does not count yet."""

    def after_error(self, optimizer: Optimizer) -> None:
        """Its step, or a hook around it, has raised an error, which is raised again. Not collective."""

    def at_boundary(self) -> None:
        """The run is between two steps, where it can be stopped."""

    def at_epoch_end(self) -> None:
        """A training iteration over a loader has ended."""

    def at_evaluation(self) -> None:
        """An evaluation begins."""

    def at_end(self) -> None:
        """The run ends, or the trial that this was added in, without an error."""

    def at_close(self) -> None:
        """The run or the trial is over, after ``at_end`` or an error. Not collective: other ranks may have failed."""

    def at_folder(self, folder: str | Path) -> None:
        """The run writes results to this folder from now on: a path or a URL."""

    def logged(self, metrics: Mapping[str, float]) -> None:
        """The script logs metrics. Called on rank 0."""

    def batches(self, batches: Batches) -> Batches:
        """Return an iterator that yields the batches of a training iteration, to measure it."""
        return batches


class Hooks:
    """The hooks of a run: for each moment, the methods of those that override it, in the order of their places.

    A moment without hooks thus costs a look at an empty list. The step calls the methods directly, by the name of the
    moment: ``for ended in hooks.at_end: ended()``.

    Args:
        hooks: in any order; each is called at its place.
    """

    registered: list[Callable[[Optimizer], None]]
    watched: list[Watched]
    keep: list[Callable[[Sequence[Optimizer], Collection[Parameter]], None]]
    before_call: list[Callable[[str], None]]
    after_call: list[Callable[[], None]]
    before_update: list[BeforeUpdate]
    after_update: list[AfterUpdate]
    after_error: list[Callable[[Optimizer], None]]
    at_boundary: list[Callable[[], None]]
    at_epoch_end: list[Callable[[], None]]
    at_evaluation: list[Callable[[], None]]
    at_end: list[Callable[[], None]]
    at_close: list[Callable[[], None]]
    at_folder: list[Callable[[str | Path], None]]
    logged: list[Callable[[Mapping[str, float]], None]]
    batches: list[Callable[[Batches], Batches]]

    def __init__(self, *hooks: StepHook) -> None:
        self.set(hooks)

    def __iter__(self) -> Iterator[StepHook]:
        return iter(self._hooks)

    def add_hook(self, hook: StepHook) -> None:
        """Call a hook from now on, at its place."""
        self.set([*self._hooks, hook])

    def remove_hook(self, hook: StepHook) -> None:
        """Call a hook no more."""
        # By identity, since hooks of scripts may define equality.
        self.set([known for known in self._hooks if known is not hook])

    def set(self, hooks: Sequence[StepHook]) -> None:
        """Call these hooks from now on, and no others."""
        # In new lists: a hook may remove itself while a list is gone through.
        self._hooks = sorted(hooks, key=lambda hook: hook.place)  # stable: those of one place keep their order
        for moment in Hooks.__annotations__:
            # Compared by class: a method that no subclass overrides does nothing, and is not worth a call.
            overriding = [hook for hook in self._hooks if getattr(type(hook), moment) is not getattr(StepHook, moment)]
            setattr(self, moment, [getattr(hook, moment) for hook in overriding])

    def call(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager around ``backward`` and ``update``, which costs nothing without hooks of a call."""
        return self._around(name) if self.before_call or self.after_call else _NOTHING

    @contextmanager
    def suspended(self, name: str) -> Iterator[None]:
        """Leave a call for code of the script in the block, which it enters again afterwards."""
        for end in self.after_call:
            end()
        try:
            yield
        finally:
            for begin in self.before_call:
                begin(name)

    @contextmanager
    def _around(self, name: str) -> Iterator[None]:
        for begin in self.before_call:
            begin(name)
        try:
            yield
        finally:
            for end in self.after_call:
                end()
