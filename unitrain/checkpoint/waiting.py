"""The second stage of a resume: states that wait until the script has made the objects that they are of.

A script may need what a checkpoint has, such as the number of a round or the samples labelled so far, to make its
loader, model or optimizer. It resumes first, and adds these objects then.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from unitrain.checkpoint.sharded.loading import CheckpointView
from unitrain.errors import CheckpointError
from unitrain.training.hooks import StepHook


@dataclass(eq=False)
class WaitingStates(StepHook):
    """The states in a checkpoint that no object has taken yet. A backward is an error until then.

    Attributes:
        view: the checkpoint, which is open.
        names: the names of the states.
        options: ``force`` and ``new_options`` of ``resume``.
    """

    view: CheckpointView
    names: Set[str]
    options: dict[str, bool]
    place = 0
    of_checkpoint = True

    def before_call(self, call: str) -> None:
        """Raise CheckpointError: new objects would be trained or saved in the place of saved ones."""
        names = sorted(self.names)
        raise CheckpointError(
            f"{self.view.place} was resumed from, but no object has taken its states of {', '.join(names)}: pass the "
            f"objects to checkpoint.add({', '.join(f'{name}={name}' for name in names)}) before training, or let "
            f"checkpoint.remove({', '.join(map(repr, names))}) drop their states."
        )
