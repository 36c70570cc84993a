"""Finds out which micro-batch a backward belongs to, and with it the weight of its loss.

Usually a script takes a batch, runs the forward and makes the step, so that a single batch is open. A script that takes
the next batch before the step on this one (to copy it ahead), or batches of several loaders, has several open. From
then on the forwards of the prepared models tell: a batch is recognised by its tensors, and otherwise taken to be the
one that was yielded last before the forward. If that guess could change the weight of the loss, it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.data.loop import BatchInUse, Iteration
from unitrain.data.order.sharding import MicroBatch
from unitrain.data.structure import tensors
from unitrain.errors import UsageError

_MOST_OPEN = 1024  # of a loop that never trains


class _Open:
    """A batch that was yielded for training, and not trained on yet.

    Attributes:
        micro_batch: its micro-batch.
        iteration: the iteration that yielded it.
        batch: the batch, as long as it is the only one that is open.
        tensors: weak references to its tensors after that, so that a batch that is not trained on is freed.
    """

    __slots__ = ("batch", "iteration", "micro_batch", "tensors")

    def __init__(self, micro_batch: MicroBatch, batch: Any, iteration: Iteration) -> None:
        self.micro_batch = micro_batch
        self.iteration = iteration
        self.batch: Any = batch
        self.tensors: list[weakref.ref[Tensor]] = []

    def close(self) -> None:
        """Record that it was trained on."""
        self.iteration.trained = True
        if self.micro_batch.last:
            self.iteration.trained_to = self.micro_batch.stop, self.micro_batch.step + 1

    def release(self) -> None:
        """Hold the batch's tensors by weak references only."""
        if self.batch is not None:
            self.tensors = [weakref.ref(tensor) for tensor in tensors(self.batch, opened=True)]
            self.batch = None

    def storages(self) -> set[int]:
        """Return the addresses of the memory of its tensors."""
        return _storages(tensor for reference in self.tensors if (tensor := reference()) is not None)


class OpenBatches:
    """The batches that were yielded for training and not trained on yet, in the order in which they were yielded.

    Args:
        in_use: is set to the batch that the script works on.
        modules: the prepared modules.
        before_forward: called with the micro-batch of a forward, if several batches are open.

    Attributes:
        micro_batch: the micro-batch that was yielded or trained on last; None without a loader.
        last_is_open: whether the last batch of an iteration that has ended is open.
    """

    def __init__(
        self, in_use: BatchInUse, modules: Iterable[nn.Module], before_forward: Callable[[MicroBatch], None]
    ) -> None:
        self._in_use = in_use
        self._modules = modules
        self._before_forward = before_forward
        self._open: list[_Open] = []
        self._used: list[_Open] = []  # by forwards since the last backward
        self._guessed = False  # whether one of them was not recognised
        self._watched: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()  # and their hooks
        self._watches = False
        self._before_watching: _Open | None = None  # the batch of the forwards that were not watched
        self.micro_batch: MicroBatch | None = None
        self.last_is_open: bool = False

    @property
    def any_open(self) -> bool:
        """Whether there is one."""
        return bool(self._open)

    def take(self, micro_batch: MicroBatch | None, batch: Any, iteration: Iteration) -> None:
        """Record a batch that a loader yields for training; None at the end of an iteration."""
        self._in_use.micro_batch = micro_batch
        if micro_batch is None:
            self.last_is_open = bool(self._open)
            if self.last_is_open:
                self._open[-1].release()
            else:
                self.micro_batch = None
            return
        self.micro_batch = micro_batch
        if self._open:
            self._open[-1].release()
            if len(self._open) >= _MOST_OPEN:
                del self._open[0]
            self._watch()
        self._open.append(_Open(micro_batch, batch, iteration))

    def drop(self, iteration: Iteration) -> None:
        """Forget the batches of an iteration that does not count."""
        self._open = [one for one in self._open if one.iteration is not iteration]
        self._used = [one for one in self._used if one.iteration is not iteration]

    def of_backward(self, *, weighted: bool) -> MicroBatch | None:
        """Return the micro-batch of the backward that begins. It is not open any more; None without a loader.

        Args:
            weighted: whether the script gives the weight of the loss.

        Raises:
            UsageError: it is not clear which of several it is, and their losses weigh differently.
        """
        if not self._open:
            return self.micro_batch
        if not self._watches:  # a single batch is open: the usual case
            one = self._open.pop()
            one.close()
            self.last_is_open = False
            return one.micro_batch
        if len(self._open) == 1:
            one = self._open.pop()
            one.close()
        else:
            one = self._bound(weighted)
            self._close_with(one)
        self._used = [other for other in self._used if other in self._open]  # for the next of several backwards
        self._guessed &= bool(self._used)
        self._before_watching = None
        self.last_is_open &= bool(self._open)
        self.micro_batch = one.micro_batch
        return one.micro_batch

    def _bound(self, weighted: bool) -> _Open:
        # An iteration that was dropped may have had the batch of the forwards before.
        one = self._before_watching if self._before_watching in self._open else self._open[-1]
        assert one is not None
        doubtful = self._open
        if self._used:
            one = self._used[0]
            if not self._guessed:
                doubtful = self._used
        for other in doubtful:
            if not weighted:
                _check_same_share(one.micro_batch, other.micro_batch)
        return one

    def _close_with(self, one: _Open) -> None:
        """Close a batch, earlier ones of its loader, which were left out, and as many of each other loader."""
        of_loaders: dict[object, list[_Open]] = {}
        for other in self._open:
            of_loaders.setdefault(other.iteration.loader, []).append(other)
        number = of_loaders[one.iteration.loader].index(one) + 1
        for others in of_loaders.values():
            for other in others[:number]:
                other.close()
                self._open.remove(other)

    def _watch(self) -> None:
        """Let the forwards of all prepared models tell which batch they are given, from now on."""
        self._watches = True
        for module in self._modules:
            if module not in self._watched:
                if not self._watched:
                    self._before_watching = self._open[-1]
                hook = _ForwardHook(self._forward)
                self._watched[module] = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._open or not (module.training and torch.is_grad_enabled()):
            return
        self._before_watching = None
        used, recognised = self._open[-1], len(self._open) == 1
        if not recognised:
            given = _storages(tensors((args, kwargs), opened=True))
            self._open[-1].release()
            matches = [one for one in self._open if given & one.storages()]
            if len({id(one.iteration.loader) for one in matches}) == len(matches) > 0:
                self._used += matches[:-1]
                used, recognised = matches[-1], True
        self._guessed |= not recognised
        if used not in self._used:
            self._used.append(used)
        self._in_use.micro_batch = used.micro_batch
        self._before_forward(used.micro_batch)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._watched.values():
            hook.remove()


class _ForwardHook:
    """A forward pre-hook that copies of the module don't have."""

    def __init__(self, call: Callable[[nn.Module, Any, Any], None] | None = None) -> None:
        # Not as a decorator: that would import the compiler together with unitrain, which takes a second or more.
        self._call = None if call is None else torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._call is not None:
            self._call(module, args, kwargs)

    def __reduce__(self) -> tuple[type[_ForwardHook], tuple[()]]:
        return _ForwardHook, ()


def _storages(tensors: Iterator[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def _check_same_share(one: MicroBatch, other: MicroBatch) -> None:
    """Check that this rank's loss weighs the same for both micro-batches."""
    if one.count * other.window != other.count * one.window:
        raise UsageError(
            f"several batches were taken from loaders before this backward, and it is not clear which one the loss is "
            f"of: {one.count} of {one.window} samples of a step are on this rank in one, {other.count} of "
            f"{other.window} in another. Take one batch per step; or pass drop_last=True and batch sizes that are "
            "multiples of the number of processes (of the sum of their shares); or pass weight= to step()."
        )
