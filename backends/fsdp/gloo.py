"""What gloo needs of fully_shard, and what saves time and memory with it on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from unitrain.process import use_huge_pages

from ..process_group.exchange import exchange
from .settings import LARGE


class Gather(AllGather):
    """Gathers large units straight into their parameters' memory, without a buffer for all of a unit.

    fully_shard has it gather into a buffer, and copies that into the parameters afterwards. Of a large unit, the buffer
    only ever has this rank's shards: the rest of it is not touched, and takes no memory. The ranks exchange the shards
    when the parameters have their memory. Small units go through the buffer: one message instead of many.

    Args:
        copy_out: what fully_shard does after the all-gather.
    """

    def __init__(self, copy_out: Callable[[Sequence[Any], Any, int], None]) -> None:
        self._copy_out = copy_out
        self._group: dist.ProcessGroup | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory that has not been touched, if it is large."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather a small unit."""
        self._group = group
        if output_tensor.nbytes < LARGE:
            # gloo's all-gather copies its result once more.
            dist.all_to_all_single(output_tensor, input_tensor.repeat(group.size()), group=group)

    def fill(self, parameters: Sequence[Any], result: Any, world_size: int) -> None:
        """Give parameters memory, and the shards of all ranks."""
        buffer = result.all_gather_output
        if buffer.nbytes < LARGE:
            self._copy_out(parameters, result, world_size)
            return
        assert self._group is not None
        for parameter, numels, dtypes in zip(
            parameters, result.param_all_gather_input_numels, result.param_all_gather_input_dtypes, strict=True
        ):
            parameter.init_all_gather_outputs(numels, dtypes, world_size, buffer.device)
            parameter.alloc_all_gather_outputs()
        # Not detach(): the graph, which needs the same values in the backward, would take them for changed ones.
        whole = [_prepare(tensor.data) for parameter in parameters for tensor in parameter.all_gather_outputs]
        shards = [tensor.view(buffer.dtype).view(world_size, -1) for tensor in whole]
        rank = self._group.rank()
        own = [one[rank] for one in shards]
        torch._foreach_copy_(own, torch.split(buffer.view(world_size, -1)[rank], result.all_gather_input_split_sizes))
        buffer.untyped_storage().resize_(0)  # fully_shard keeps it for a stream
        exchange([own] * world_size, [[one[source] for one in shards] for source in range(world_size)], self._group)()


class AllToAll(ReduceScatter):
    """A sum whose parts go only to the ranks that keep them. gloo's own reduce-scatter took twice as long."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the input or the output."""
        return _prepare(torch.empty(*size, dtype=dtype, device=device))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum the ranks' inputs, each rank a part of them. Frees the input, which fully_shard keeps for a stream."""
        parts = _prepare(torch.empty_like(input_tensor))
        dist.all_to_all_single(parts, input_tensor, group=group)
        input_tensor.untyped_storage().resize_(0)
        torch.sum(parts.view(group.size(), -1), 0, out=output_tensor)


def _prepare(tensor: Tensor) -> Tensor:
    """Have huge pages for a large tensor of new memory, which is used for so short a time that to get it counts."""
    if tensor.nbytes >= LARGE:
        use_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def adapt(unit: FSDPModule, device: torch.device) -> None:
    """Set how a unit communicates."""
    unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    if device.type == "cpu":
        unit.set_custom_reduce_scatter(AllToAll())
        for group in unit._get_fsdp_state()._fsdp_param_groups:  # one, or none
            gather = Gather(group._all_gather_output_fn)
            unit.set_custom_all_gather(gather)
            group._all_gather_output_fn = gather.fill
        # The next unit could be gathered before this one's backward, but gloo would not do it meanwhile: it blocks.
        unit.set_modules_to_backward_prefetch([unit])
