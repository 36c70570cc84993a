"""A process group for the core's collectives, separate from the one that DDP averages gradients in."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.communication.backend import Wait

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# Newer releases of torch have renamed this function, and deprecate the old name.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
# Dtypes that gloo and NCCL can't reduce, and the dtypes to convert them to.
_WIDER = {torch.int16: torch.int32}


class CoreGroup:
    """Asynchronous collectives on a new process group of all ranks. Collective."""

    def __init__(self, timeout: timedelta) -> None:
        group = dist.new_group(timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        self._group: dist.ProcessGroup = group

    def close(self) -> None:
        """Destroy the group and drop the reference to it: gloo's threads end with the last one."""
        dist.destroy_process_group(self._group)
        del self._group

    def all_reduce(self, tensor: Tensor, op: str) -> Wait:
        """See ``Backend.all_reduce``."""
        wide = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))
        wait = _wait(dist.all_reduce(wide, _OPS[op], group=self._group, async_op=True))
        if wide is tensor:
            return wait

        def finish() -> None:
            wait()
            tensor.copy_(wide)

        return finish

    def all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """See ``Backend.all_gather``."""
        gathered = tensor.new_empty(dist.get_world_size(self._group), *tensor.shape)
        wait = _wait(_ALL_GATHER(gathered, tensor.unsqueeze(0), group=self._group, async_op=True))

        def finish() -> Tensor:
            wait()
            return gathered

        return finish

    def broadcast(self, tensor: Tensor, src: int) -> Wait:
        """See ``Backend.broadcast``."""
        return _wait(dist.broadcast(tensor, src, group=self._group, async_op=True))


def _wait(work: dist.Work | None) -> Wait:
    assert work is not None  # async_op=True, and this rank is in the group

    def wait() -> None:
        work.wait()

    return wait
