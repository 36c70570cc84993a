"""Checks a script on several processes for mistakes that train other weights on each rank, or the same N times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from unitrain import call_site
from unitrain.communication.communicator import Communicator
from unitrain.data.order.sharding import MicroBatch
from unitrain.data.reading.fingerprint import fingerprint, sample_digest
from unitrain.errors import UsageError
from unitrain.rng import generators_restored, seed_generators
from unitrain.training.hooks import StepHook
from unitrain.training.loop.batches import OpenBatches
from unitrain.training.loop.loss_check import LossCheck
from unitrain.training.windows.weights import Losses

_LOSSES = 3
_STEPS = 3


class CopyCheck:
    """Warns of ranks that all train on the same data without a loader of the strategy.

    At the first step, it looks for a torch DataLoader that reads the whole dataset on each rank. Then it compares the
    ranks' first losses: if they are equal bit for bit, these are N copies of one job.

    Attributes:
        pending: whether further losses need to be compared.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._checks_left = _LOSSES
        self.pending: bool = communicator.world_size > 1

    def compare(self, loss: Tensor) -> None:
        """Compare one loss, and before the first the datasets of torch's DataLoaders. Collective.

        Args:
            loss: a tensor of the same shape on every rank.
        """
        if self._checks_left == _LOSSES:  # the first loss: the script's DataLoader has an iterator now
            datasets = self._communicator.all_gather_data(_plainly_read())
            if datasets[0] and len(set(datasets)) == 1:
                self.pending = False
                self._communicator.warn(
                    f"each of {self._communicator.world_size} ranks trains on the whole dataset, by a torch DataLoader "
                    "that shards nothing, so that an epoch repeats each sample on every rank. Use strategy.dataloader("
                    "dataset, global_batch_size=...), which gives each rank its part. If it is meant, pass a generator "
                    "or a sampler of yours to the DataLoader."
                )
                return
        losses = self._communicator.all_gather(loss.detach().double())
        # Several in a row, as one can be equal by chance: a constant loss, or the first of a model without dropout.
        equal = bool((losses == losses[0]).all())
        self._checks_left -= 1
        self.pending = equal and self._checks_left > 0
        if equal and not self.pending:
            self._communicator.warn(
                f"the first {_LOSSES} losses are equal on all {self._communicator.world_size} ranks, which seem to "
                "train on the same samples, at no gain in speed. Use strategy.dataloader, which shards the dataset."
            )


def _plainly_read() -> str:
    """Return a description of the dataset that a torch DataLoader reads now, the same on all ranks; "" without one.

    The strategy is not told of the script's DataLoader, so its iterator is searched for among all objects.
    """
    for candidate in gc.get_objects():
        kind = type(candidate)  # known by its module, since torch's classes of iterators are private
        if getattr(kind, "__module__", "") != DataLoader.__module__ or not hasattr(kind, "__next__"):
            continue
        for part in vars(candidate).values():
            with suppress(Exception), generators_restored():  # a dataset may raise any exception
                seed_generators(0)  # so that ranks that read the same dataset get the same sample of it
                if read := _read_as_a_whole(part):
                    return read
    return ""


def _read_as_a_whole(part: Any) -> str:
    """Return a description of the data that a part of a DataLoader's iterator reads; "" if it may shard them."""
    if isinstance(part, IterableDataset) and not type(part).__module__.startswith("unitrain."):
        stream = iter(part)
        return "" if stream is part else str(sample_digest(next(stream)))  # else the sample would be lost
    sampler: Any = part.sampler if type(part) is BatchSampler else part
    # Exact classes: a subclass, as a sampler of the script's, may draw by rank.
    drawn = type(sampler) is RandomSampler and sampler.generator is None
    if drawn or type(sampler) is SequentialSampler:
        data = sampler.data_source
        return f"{len(data)} {fingerprint(data) or sample_digest(data[0])}"
    return ""


class SchedulerCheck:
    """Warns of a scheduler that the script steps as well after each of the first steps of the strategy.

    Attributes:
        pending: whether further steps need to be looked at.
    """

    def __init__(self, *, pending: bool) -> None:
        self.pending: bool = pending
        self._steps = 0
        self._due = 0

    def look(self, scheduler: Any) -> None:
        """Look at a scheduler before the strategy steps it.

        Args:
            scheduler: as it is passed to ``step``. ``last_epoch`` counts all of its steps, the script's too.
        """
        count = getattr(scheduler, "last_epoch", 0)  # schedulers of other libraries may not count
        # Between two of the strategy's steps, the count of a scheduler must grow by that one step.
        self.pending = not self._steps or (count > self._due and self._steps < _STEPS)
        if self._steps == _STEPS and count > self._due:
            call_site.warn(
                f"{type(scheduler).__name__} is stepped twice: by strategy.step, which it was passed to, and by the "
                "script. Remove scheduler.step() from the loop, or don't pass it to strategy.step."
            )
        self._steps += 1
        self._due = count + 1


class ScriptChecks(StepHook):
    """Looks at the calls of a script, and warns of those that are probably mistakes. Most run in the first steps only.

    Args:
        communicator: of this process.
        accumulate: number of micro-batches per step.
        is_prepared: returns whether a parameter belongs to a prepared module.

    Attributes:
        direct: refuses steps that are not made by the strategy; None in one process.
        schedulers: looks at schedulers that are about to step.
        next_look: the first step for which ``before_backward`` is to be called. Most steps need no look.
    """

    def __init__(self, communicator: Communicator, accumulate: int, is_prepared: Callable[[Parameter], bool]) -> None:
        self._communicator = communicator
        self._pulse = communicator.collectives.pulse
        self._losses = LossCheck(accumulate, communicator.world_size, warns=communicator.is_main)
        self.schedulers: SchedulerCheck = SchedulerCheck(pending=communicator.is_main)
        self.direct: DirectStepCheck | None = DirectStepCheck(is_prepared) if communicator.world_size > 1 else None
        self.next_look: int = 0

    def before_backward(self, losses: Losses, micro_batch: MicroBatch | None) -> None:
        """Refuse a backward after ``close``, and look at the losses of some steps.

        Args:
            losses: the losses.
            micro_batch: the micro-batch that they are of; None without a loader.

        Raises:
            UsageError: the strategy is closed: its collectives would never return.
        """
        if self.next_look < 0:
            raise UsageError("backward() was called after strategy.close().")
        for loss in losses.each:
            self._losses.look(loss, self._pulse.step, weighted=bool(losses.weights), micro_batch=micro_batch)
        self.next_look = self._losses.next_step

    def at_epoch_end(self) -> None:
        """Compare the divisors of the ranks' losses, if there was one on all ranks. Collective then."""
        if self._communicator.world_size > 1 and self.next_look:
            self._losses.compare(self._communicator)

    def no_gradients(self, name: str) -> None:
        """Warn of a step without gradients."""
        self._communicator.warn(
            f"no parameter of {name} has a gradient, so this step changes nothing: the loss does not depend on them. "
            "If the model's parameters are others since prepare() (by a deep copy, a new layer, or load_state_dict "
            "with assign=True), prepare the new ones, with an optimizer of theirs."
        )

    def check_batches(self, batches: OpenBatches) -> None:
        """Look at whether all batches were trained on, at the end of a run."""
        if batches.has_left_out:
            self._communicator.warn(
                "a loader has yielded a batch more than step() was called for: a batch before the first step of an "
                "epoch was left out, or the last one. The losses that followed were matched to the batch before "
                "theirs, and a resumed run would repeat one. Call step() for every batch; to leave one out, multiply "
                "its loss by 0."
            )

    def close(self) -> None:
        """Remove the checks, and refuse further backwards."""
        self.next_look = -1
        if self.direct is not None:
            self.direct.close()


class DirectStepCheck(StepHook):
    """Refuses steps of optimizers of prepared parameters that are not made by the strategy.

    A step pre-hook of all optimizers raises UsageError in ``optimizer.step()``.

    Attributes:
        allowed: whether the strategy is making a step.
    """

    place = 0

    def __init__(self, is_prepared: Callable[[Parameter], bool]) -> None:
        self.allowed: bool = False
        self._is_prepared = is_prepared
        self._harmless: WeakSet[Optimizer] = WeakSet()
        self._hook = register_optimizer_step_pre_hook(self._check)

    def before_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Allow the strategy's step."""
        self.allowed = True

    def after_update(self, optimizer: Optimizer, parameters: Sequence[Parameter], stepped: bool) -> None:
        """Allow none."""
        self.allowed = False

    def after_error(self, optimizer: Optimizer) -> None:
        """Allow none."""
        self.allowed = False

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Runs in each step of every optimizer, of other models too: these are looked at once.
        if self.allowed or optimizer in self._harmless:
            return
        if any(self._is_prepared(p) for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "optimizer.step() was called for a prepared model. With several processes, gradients are averaged, "
                "clipped and checked in strategy.step(loss, optimizer), or in strategy.backward and strategy.update: "
                "call these instead of loss.backward() and optimizer.step()."
            )
        self._harmless.add(optimizer)

    def close(self) -> None:
        """Remove the check."""
        self._hook.remove()
