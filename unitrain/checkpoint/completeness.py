"""Warns of objects that a run trains with and its checkpoints lack: a resumed run would begin anew with them."""

from __future__ import annotations

import gc
import itertools
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from unitrain import call_site
from unitrain.checkpoint.contents import Contents
from unitrain.data import Loader
from unitrain.data.loop import Iteration
from unitrain.training.loop.step import TrainingStep
from unitrain.training.windows.windows import version_of


class Earlier:
    """What a run had trained with when a checkpoint was opened, such as the fold before in a cross-validation."""

    def __init__(self, step: TrainingStep) -> None:
        self._versions = WeakKeyDictionary({optimizer: version_of(optimizer) for optimizer in step.windows.optimizers})
        self._iterations = WeakSet(step.batches.trained)

    def has_finished(self, optimizer: Optimizer) -> bool:
        """Return whether the parameters of an optimizer are as they were: it has not been used since."""
        return self._versions.get(optimizer) == version_of(optimizer)

    def has_read(self, iteration: Iteration) -> bool:
        """Return whether an iteration over a loader was trained on before."""
        return iteration in self._iterations


def warn_of_missing(contents: Contents, step: TrainingStep, earlier: Earlier) -> None:
    """Warn if the objects of a checkpoint lack an optimizer, a scheduler, a loader or an average of weights.

    Args:
        contents: of the checkpoint.
        step: of the run.
        earlier: what was used before the checkpoint was opened, and is left out if it was not used since.
    """
    saved, missing = list(contents.objects.values()), []
    plateaus = [scheduler.optimizer for scheduler in gc.get_objects() if type(scheduler) is ReduceLROnPlateau]
    for optimizer in itertools.filterfalse(earlier.has_finished, step.windows.optimizers):
        if optimizer.state and not any(value is optimizer for value in saved):  # plain SGD has nothing to lose
            missing.append(f"an optimizer ({type(optimizer).__name__})")
        # Schedulers set initial_lr, except one that waits for a plateau.
        scheduled = any("initial_lr" in group for group in optimizer.param_groups)
        scheduled = scheduled or any(stepped is optimizer for stepped in plateaus)
        if scheduled and not any(getattr(value, "optimizer", None) is optimizer for value in saved):
            missing.append("a scheduler")
    loaders = [value.identity for value in saved if isinstance(value, Loader)]
    read = itertools.filterfalse(earlier.has_read, step.batches.trained)
    missing += ["a loader" for iteration in read if iteration.loader not in loaders]
    kept = [hook for hook in step.hooks if hook.kept_in_checkpoints]
    missing += [hook.kept_in_checkpoints for hook in kept if not any(value is hook for value in saved)]
    if missing:
        call_site.warn(
            f"this run trains with {', '.join(dict.fromkeys(missing))} that its checkpoints don't contain: a resumed "
            "run would begin anew with what is missing. Pass it, as in strategy.checkpoint(folder, ..., optimizer="
            "optimizer, loader=train), or partial=True if that is meant."
        )
