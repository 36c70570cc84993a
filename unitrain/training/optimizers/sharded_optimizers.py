"""Optimizers of which each rank has a part of the state, and makes a part of the update (``shard_optimizer``, ZeRO-1).

Each rank has some rows of each parameter's state (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", SC 2020, first stage). Gradients are averaged as otherwise, so all ranks check and clip them
alike. The groups of an optimizer keep the model's parameters, and so do scripts and schedulers that look at them. Only
while it steps, they are replaced by views of this rank's rows, whose gradients are views, too. Then the ranks exchange
the rows that they have updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.communication.row_shards import RowShard, rows_of
from unitrain.data.structure import tensors
from unitrain.errors import UsageError
from unitrain.training.gradients.gradients import is_dense
from unitrain.training.hooks import StepHook
from unitrain.training.optimizers.row_gather import RowGather
from unitrain.training.optimizers.row_trial import Shape, exchange, mapped_state, shapes_of_common_state


class ShardedOptimizers(StepHook):
    """Divides optimizers among the ranks.

    Args:
        communicator: the communicator of this process.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sharded: dict[Optimizer, _ShardedOptimizer] = {}
        self._load = [0] * communicator.world_size  # elements of each rank

    def shard(self, optimizer: Optimizer) -> None:
        """Divide an optimizer, or what was added to it since this was called before.

        Raises:
            UsageError: its step on some rows of a parameter would not be its step on the whole parameter.
        """
        sharded = self._sharded.get(optimizer)
        known = {} if sharded is None else sharded.known
        groups = [group for group in optimizer.param_groups if any(p not in known for p in group["params"])]
        if not groups:
            return
        common = shapes_of_common_state(optimizer, groups)
        if sharded is None:
            name = f"rows of optimizer {len(self._sharded)}"
            sharded = _ShardedOptimizer(optimizer, self._communicator, name)
            self._sharded[optimizer] = sharded
        new = [p for group in groups for p in group["params"] if p not in known]
        # The largest rows first: the others make up for what these leave uneven.
        new.sort(key=lambda p: -p.numel() // max(1, len(p)) if p.dim() else 0)
        sharded.add(optimizer, {p: self._counts(p, common) for p in new}, common)

    def _counts(self, parameter: Parameter, common: set[Shape]) -> Sequence[int] | None:
        """Return how many rows of a parameter each rank has, and note it; None if every rank has all."""
        if parameter in self._communicator.row_counts:  # of another optimizer
            return self._communicator.row_counts[parameter]
        if not _has_rows(parameter):
            return None
        row = parameter.numel() // len(parameter)
        counts = evened(self._load, len(parameter), row)
        if not common.isdisjoint((count, *parameter.shape[1:]) for count in (len(parameter), *counts)):
            return None  # the shape of a tensor in its state would not tell whether that is divided
        self._load = [load + count * row for load, count in zip(self._load, counts, strict=True)]
        self._communicator.row_counts[parameter] = counts
        return counts

    def before_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Let the hooks of scripts see whole parameters."""
        self._sharded[optimizer].move_hooks(optimizer)

    def after_update(self, optimizer: Optimizer, parameters: Sequence[Parameter], stepped: bool) -> None:
        """Give the optimizer the model's parameters back, if it has not done so itself."""
        self.abandon(optimizer)

    def abandon(self, optimizer: Optimizer) -> None:
        """Give an optimizer the model's parameters back, if its step has raised an error."""
        if optimizer in self._sharded:
            self._sharded[optimizer].abandon(optimizer)

    def as_shard(self, tensor: Tensor) -> Tensor:
        """Return what stands for the whole of a tensor in an optimizer's state; the tensor itself if it is none."""
        for optimizer, sharded in self._sharded.items():
            for parameter, counts in sharded.divided.items():
                if any(tensor is value for value in tensors(optimizer.state.get(parameter, {}))):
                    shape = (counts[self._communicator.rank], *parameter.shape[1:])
                    if tuple(tensor.shape) == shape:
                        return RowShard(tensor, counts, self._communicator.rank)
        return tensor


class _ShardedOptimizer:
    """One optimizer, and its hooks.

    Attributes:
        known: its parameters so far.
        divided: those that are divided, with the number of rows of each rank. All ranks have the others' state.
    """

    def __init__(self, optimizer: Optimizer, communicator: Communicator, name: str) -> None:
        self._communicator = communicator
        self._name = name
        self._common: set[Shape] = set()
        self.known: dict[Parameter, None] = {}
        self.divided: dict[Parameter, Sequence[int]] = {}
        self._memory: list[int] = []
        self._views: list[tuple[Parameter, Parameter, int, int]] = []  # a parameter, its rows, their start and number
        self._gather: Callable[[], None] = lambda: None
        self._depth = 0  # a class may call the step of its base class, whose hooks are the same
        self._before = optimizer.register_step_pre_hook(self._enter)
        self._after = optimizer.register_step_post_hook(self._leave)
        optimizer.register_state_dict_post_hook(self._with_shards)
        optimizer.register_load_state_dict_pre_hook(self._with_rows)

    def add(self, optimizer: Optimizer, counts: Mapping[Parameter, Sequence[int] | None], common: set[Shape]) -> None:
        """Divide the state of new parameters, given the numbers of their rows."""
        self.known.update(dict.fromkeys(counts))
        self._common |= common
        for parameter, its in counts.items():
            if its is None:
                continue
            self.divided[parameter] = its
            if parameter in optimizer.state:
                optimizer.state[parameter] = self._own(optimizer.state[parameter], parameter)

    # -------------------------------------------------------------------------------------------------------- steps

    def move_hooks(self, optimizer: Any) -> None:
        """Let the hooks of scripts see whole parameters."""
        optimizer._optimizer_step_pre_hooks.move_to_end(self._before.id)
        optimizer._optimizer_step_post_hooks.move_to_end(self._after.id, last=False)

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Give the optimizer the rows of this rank."""
        if self._communicator.closed:
            raise UsageError(
                "an optimizer was stepped after strategy.close(), when each rank has a part of its state only "
                "(shard_optimizer): step it before."
            )
        self._depth += 1
        if self._depth > 1:
            return
        memory = [0 if p.grad is None else p.data_ptr() for p in self.divided]
        if memory != self._memory:
            self._lay_out(memory)
        for parameter, rows, start, count in self._views:
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which shard_optimizer does "
                    "not support: create its layer with sparse=False."
                )
            rows.grad = parameter.grad.narrow(0, start, count)
        exchange(optimizer, {parameter: rows for parameter, rows, _, _ in self._views})

    def _lay_out(self, memory: list[int]) -> None:
        """Make views of the rows of parameters that have gradients, in their memory of now."""
        used = {p: counts for (p, counts), address in zip(self.divided.items(), memory, strict=True) if address}
        if not all(map(_has_rows, used)):
            raise UsageError(
                "the memory format of a parameter was changed after prepare() had divided its optimizer "
                "(shard_optimizer): change it before."
            )
        rank = self._communicator.rank
        self._views = [
            (p, Parameter(rows_of(p, counts, rank)), sum(counts[:rank]), counts[rank]) for p, counts in used.items()
        ]
        self._gather = RowGather(self._communicator, used.items(), self._name)
        self._memory = memory

    def _leave(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Give it the model's parameters back, and exchange the rows."""
        self._depth -= 1
        if self._depth:
            return
        self._put_back(optimizer)
        self._gather()

    def abandon(self, optimizer: Optimizer) -> None:
        """Give it the model's parameters back, if it has rows."""
        if self._depth:
            self._depth = 0
            self._put_back(optimizer)

    def _put_back(self, optimizer: Optimizer) -> None:
        for _, rows, _, _ in self._views:
            rows.grad = None
        exchange(optimizer, {rows: parameter for parameter, rows, _, _ in self._views})

    # -------------------------------------------------------------------------------------------------------- state

    def _own(self, state: Any, parameter: Parameter) -> Any:
        """Return a parameter's state with this rank's rows in place of whole tensors, and of what stands for them."""
        counts, rank = self.divided[parameter], self._communicator.rank

        def own(value: Tensor) -> Tensor:
            return value.local if isinstance(value, RowShard) else rows_of(value, counts, rank).clone()

        return mapped_state(state, tuple(parameter.shape), own)

    def _with_shards(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict in which each tensor of rows stands for a whole tensor."""
        rank = self._communicator.rank

        def shards(state: Any, parameter: Parameter) -> Any:
            counts = self.divided[parameter]
            shape = (counts[rank], *parameter.shape[1:])
            for value in tensors(state):
                if value.dim() and tuple(value.shape) not in (shape, *self._common):
                    raise UsageError(
                        f"{type(optimizer).__name__} has a state of shape {tuple(value.shape)} for rows of shape "
                        f"{shape}, and had none when it was tried: set shard_optimizer to false."
                    )
            return mapped_state(state, shape, lambda value: RowShard(value, counts, rank))

        return self._changed(optimizer, state_dict, shards)

    def _with_rows(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict, of whole tensors or not, with this rank's rows."""
        return self._changed(optimizer, state_dict, self._own)

    def _changed(
        self, optimizer: Optimizer, state_dict: dict[str, Any], change: Callable[[Any, Parameter], Any]
    ) -> dict[str, Any]:
        state = dict(state_dict["state"])
        for number, parameter in _numbered(optimizer, state_dict):
            if number in state and parameter in self.divided:
                state[number] = change(state[number], parameter)
        return {**state_dict, "state": state}


def evened(load: Sequence[int], rows: int, row: int) -> tuple[int, ...]:
    """Divide rows so that all ranks have as much as possible of the same load.

    Args:
        load: what each rank has already, in elements.
        rows: number of rows.
        row: elements of a row.

    Returns:
        The number of rows of each rank.
    """
    ascending = sorted(load)
    for ranks, so_far in enumerate(accumulate(ascending), 1):  # the number of ranks that get any rows, and their load
        level = (so_far + rows * row) // ranks
        if ranks == len(load) or level <= ascending[ranks]:
            break
    counts = [max(0, (level - its) // row) for its in load]
    least = sorted(range(len(load)), key=lambda rank: load[rank] + counts[rank] * row)
    for rank in least[: rows - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


def _numbered(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, Parameter]]:
    """Yield the number of each parameter in a state dict, and the parameter."""
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        yield from dict(zip(saved["params"], group["params"], strict=False)).items()


def _has_rows(parameter: Parameter) -> bool:
    """Return whether a parameter's rows are blocks of its memory, one after the other."""
    if not parameter.dim() or not parameter.numel() or not is_dense(parameter):
        return False
    return len(parameter) == 1 or parameter.stride(0) == parameter.numel() // len(parameter)
