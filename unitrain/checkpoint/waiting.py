"""The second stage of a resume: states that wait until the script has made the objects that they are of.

A script may need what a checkpoint has, such as the number of a round or the samples labelled so far, to make its
loader, model or optimizer. It resumes first, and adds these objects then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.checkpoint.contents import Contents
from unitrain.checkpoint.sharded.loading import CheckpointView
from unitrain.errors import CheckpointError
from unitrain.training.hooks import StepHook


class WaitingStates(StepHook):
    """The states in an open checkpoint that no object has taken yet. A step is an error until then.

    Args:
        view: the checkpoint. It stays open.
        names: of the states.
        force: as of ``resume``.
        new_options: as of ``resume``.
    """

    place = 0

    def __init__(self, view: CheckpointView, names: set[str], *, force: bool, new_options: bool) -> None:
        self.view: CheckpointView = view
        self.names: set[str] = names
        self._force = force
        self.new_options: bool = new_options

    def fit(self, contents: Contents, names: Collection[str], *, last: bool) -> None:
        """Raise CheckpointError unless the states of these names are of the objects of ``contents``, and all wait.

        Args:
            contents: has the objects.
            names: of objects that are added.
            last: whether no states wait after that.
        """
        unknown = sorted(set(names) - self.names)
        if unknown:
            raise CheckpointError(
                f"the checkpoint has no {', '.join(unknown)}: the states of {self._shown} wait for objects. Add these "
                "first, under their names. Nothing was loaded."
            )
        contents.fit(self.view, names, last=last, force=self._force, new_options=self.new_options)

    def before_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Refuse to train with what the script has made in place of what was saved."""
        self.refuse()

    def refuse(self) -> None:
        """Raise CheckpointError."""
        names = sorted(self.names)
        raise CheckpointError(
            f"the run was resumed, but no object has taken the states of {self._shown}: pass the objects to "
            f"checkpoint.add({', '.join(f'{name}={name}' for name in names)}) before training, or let "
            f"checkpoint.remove({', '.join(map(repr, names))}) drop their states."
        )

    @property
    def _shown(self) -> str:
        return ", ".join(sorted(self.names))
