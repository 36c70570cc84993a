"""Elastic training: state that is committed, and comes back when the job is started again.

UniTrain ends all ranks when one fails, and the job is started again, with as many ranks as there are then: by
``unitrain run --max-restarts``, torchrun, horovodrun's elastic driver, or a scheduler. So a process never continues by
itself in another world, as with Horovod. With the variable ``UNITRAIN_ELASTIC_FOLDER``, a checkpoint is open while the
function runs that ``run`` has wrapped, and each commit is a boundary of it: copies in memory are made there, signals
stop there, and the next start continues from there.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

from torch import nn, optim
from torch.utils.data import Sampler

from unitrain.checkpoint import Checkpoint
from unitrain.compat.horovod.collectives import broadcast_object
from unitrain.compat.horovod.world import rank, size, strategy

FOLDER = "UNITRAIN_ELASTIC_FOLDER"
R = TypeVar("R")


class State:
    """Objects that are committed, restored and made the same on all ranks together. They become attributes.

    Args:
        bcast_object: not used; the module's ``broadcast_object`` is.
        get_rank: not used.
        **kwargs: the objects. Of those that have ``state_dict``, the state is kept, and of others a copy.
    """

    _checkpoint: Checkpoint | None = None  # while the function runs that ``run`` has wrapped

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        vars(self).update(kwargs)
        self._names = list(kwargs)
        self._reset_callbacks: list[Callable[[], object]] = []
        self.save()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Have functions called when the job continues after another start."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the functions for when the job continues."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Prepare for another number of ranks."""

    def commit(self) -> None:
        """Save the state, and pass a boundary of the run. Collective."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Pass a boundary of the run, where it is copied, saved and stopped. Collective."""
        if self._checkpoint is not None:
            # Copies in memory are made by the number of steps.
            strategy().communicator.collectives.pulse.step += 1
            with self._checkpoint.round():
                pass

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        self._saved = copy.deepcopy(self.state_dict())

    def restore(self) -> None:
        """Go back to the copy."""
        self.load_state_dict(copy.deepcopy(self._saved))  # optimizers keep its tensors

    def sync(self) -> None:
        """Give all ranks the state of rank 0, and save it. Collective."""
        self.load_state_dict(broadcast_object(self.state_dict()))
        self.save()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the objects by name, and those objects that have none."""
        objects = {name: getattr(self, name) for name in self._names}
        return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in objects.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of the objects, and set those objects that have none."""
        for name, value in state_dict.items():
            if hasattr(getattr(self, name), "state_dict"):
                getattr(self, name).load_state_dict(value)
            else:
                setattr(self, name, value)


ObjectState = State


class TorchState(State):
    """The state of a model, an optimizer and other objects.

    Args:
        model: the model, if any.
        optimizer: the optimizer, if any.
        **kwargs: others, as of ``State``.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: optim.Optimizer | None = None, **kwargs: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **kwargs)


class ElasticSampler(Sampler[int]):
    """Divides the samples of an epoch that are not processed yet among the ranks, however many there are.

    Args:
        dataset: the dataset, of constant size.
        shuffle: whether to shuffle it.
        seed: the seed of the order, the same on all ranks.

    Attributes:
        epoch: the epoch, which the order follows from.
        processed_num: the number of samples of this epoch that all ranks have processed.
        remaining_indices: the samples that were not processed when the epoch began, or continued.
    """

    epoch: int
    processed_num: int
    remaining_indices: list[int]

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset: Sized = dataset
        self.shuffle: bool = shuffle
        self.seed: int = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: call it at the end of the one before."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has processed a batch."""
        self.processed_num += batch_size * size()

    def state_dict(self) -> dict[str, int]:
        """Return where the epoch is."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go to a place in an epoch."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the samples that are left among the present ranks."""
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]

    def __iter__(self) -> Iterator[int]:
        """Return the samples of this rank. Ranks that would have fewer than others repeat the first of them."""
        return itertools.islice(itertools.cycle(self.remaining_indices), rank(), len(self) * size(), size())

    def __len__(self) -> int:
        """Return the number of samples of each rank."""
        return math.ceil(len(self.remaining_indices) / size())


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Wrap a function of a state, so that it begins with the state that the last start committed.

    Without the variable ``UNITRAIN_ELASTIC_FOLDER``, commits last as long as the job.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        if folder := os.environ.get(FOLDER):
            state._checkpoint = strategy().checkpoint(folder, partial=True, state=state)
            if state._checkpoint.resume():
                # As after one of Horovod's resets: another number of ranks may need another learning rate.
                state.on_reset()
        else:
            strategy().communicator.warn(
                f"set {FOLDER}, and use unitrain run --max-restarts, to continue from commits."
            )
        state.sync()
        result = func(state, *args, **kwargs)
        if state._checkpoint is not None:
            # Started once more, the function returns at once.
            state._checkpoint.save()
            state._checkpoint.close()
            state._checkpoint = None
        return result

    return wrapper
