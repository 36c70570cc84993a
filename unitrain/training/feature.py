"""``Feature``: the base class of UniTrain's own features and of features that scripts add to a run."""

from __future__ import annotations

from typing import Any

from unitrain.process import print_stderr
from unitrain.training.hooks import StepHook
from unitrain.training.loop.judge import Verdict
from unitrain.training.loop.sockets import Sockets
from unitrain.training.models.passes import ModulePass


class Feature(StepHook, Verdict):
    """A capability that is added to a run with ``strategy.add``. A subclass overrides the methods that it needs.

    It is notified around each step (the methods of ``StepHook``), may forbid a step on all ranks (the methods of
    ``Verdict``), and may have a state that checkpoints save and resume. One that changes modules in ``prepare`` is a
    ``unitrain.ModulePass`` as well.

    Attributes:
        name: of its state in checkpoints; "" if it has none. It is unique among the features of a run.

    Example:
        >>> class Countdown(unitrain.Feature):
        ...     name = "countdown"
        ...
        ...     def __init__(self, steps):
        ...         self.left = steps
        ...
        ...     def after_update(self, optimizer, parameters, stepped):
        ...         self.left -= stepped
        ...
        ...     def state_dict(self):
        ...         return {"left": self.left}
        ...
        ...     def load_state_dict(self, state):
        ...         self.left = state["left"]
        >>> countdown = strategy.add(Countdown(1000))
    """

    name: str = ""

    def plug_in(self, sockets: Sockets) -> None:
        """Plug this into a run. A feature that needs more than these sockets overrides it, and calls it.

        Args:
            sockets: the parts of the run.
        """
        sockets.hooks.add_hook(self)
        # Each of these costs a step nothing if no method is overridden: see ``Hooks`` and ``Judge.reads_norms``.
        sockets.verdicts.append(self)
        if isinstance(self, ModulePass):
            sockets.passes.append(self)
            # Otherwise a feature that was added too late would do nothing, silently.
            if sockets.prepared.count and sockets.communicator.is_main:
                print_stderr(
                    f"unitrain: {type(self).__name__} changes modules that are prepared from now on, but none of those "
                    "that have been prepared: add it before prepare() if it should."
                )
        if self.name:
            sockets.states.add(self.name, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: plain data and tensors, the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` has returned."""
