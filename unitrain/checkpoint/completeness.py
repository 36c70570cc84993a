"""Warns of objects that a run trains with and its checkpoints lack: a resumed run would begin anew with them."""

from __future__ import annotations

import gc

from torch.optim.lr_scheduler import ReduceLROnPlateau

from unitrain import call_site
from unitrain.checkpoint.contents import Contents
from unitrain.data import Loader
from unitrain.training.loop.step import TrainingStep


def warn_of_missing(contents: Contents, step: TrainingStep) -> None:
    """Warn if the objects of a checkpoint lack an optimizer, a scheduler, a loader or an average of weights."""
    saved, missing = list(contents.objects.values()), []
    plateaus = [scheduler.optimizer for scheduler in gc.get_objects() if type(scheduler) is ReduceLROnPlateau]
    for optimizer in step.windows.optimizers:
        if optimizer.state and not any(value is optimizer for value in saved):  # plain SGD has nothing to lose
            missing.append(f"an optimizer ({type(optimizer).__name__})")
        # Schedulers set initial_lr, except one that waits for a plateau.
        scheduled = any("initial_lr" in group for group in optimizer.param_groups)
        scheduled = scheduled or any(stepped is optimizer for stepped in plateaus)
        if scheduled and not any(getattr(value, "optimizer", None) is optimizer for value in saved):
            missing.append("a scheduler")
    loaders = [value.identity for value in saved if isinstance(value, Loader)]
    missing += ["a loader" for identity in step.batches.trained_loaders if identity not in loaders]
    kept = [hook for hook in step.hooks if hook.kept_in_checkpoints]
    missing += [hook.kept_in_checkpoints for hook in kept if not any(value is hook for value in saved)]
    if missing:
        call_site.warn(
            f"this run trains with {', '.join(dict.fromkeys(missing))} that its checkpoints don't contain: a resumed "
            "run would begin anew with what is missing. Pass it, as in strategy.checkpoint(folder, ..., optimizer="
            "optimizer, loader=train), or partial=True if that is meant."
        )
