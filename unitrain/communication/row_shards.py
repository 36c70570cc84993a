"""``RowShard``: a tensor of which each rank has some rows, such as the state of an optimizer that is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from unitrain.errors import UsageError


class RowShard(Tensor):
    """Stands for a tensor that is divided among the ranks in its first dimension. It has this rank's rows.

    It has the shape, dtype and device of the whole tensor, but can't be computed with.

    Args:
        local: this rank's rows.
        counts: the number of rows of each rank.
        rank: this rank.
    """

    local: Tensor
    counts: Sequence[int]
    rank: int

    @staticmethod
    def __new__(cls, local: Tensor, counts: Sequence[int], rank: int) -> RowShard:
        """Make the tensor, without memory for its elements."""
        shape = (sum(counts), *local.shape[1:])
        made: RowShard = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.counts, made.rank = local, counts, rank
        return made

    @classmethod
    def owned(cls, local: Tensor | None, shape: Sequence[int], dtype: torch.dtype, owner: int, ranks: Any) -> RowShard:
        """Return what stands for a tensor that one rank has; without its rows on the other ranks."""
        counts = [shape[0] if rank == owner else 0 for rank in range(ranks.world_size)]
        if local is None:
            local = torch.empty((0, *shape[1:]), dtype=dtype, device=ranks.device)
        return cls(local, counts, ranks.rank)

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse every operation."""
        _refuse()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled or copied, which would lose the rows of other ranks."""
        _refuse()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse to be copied, as when it is pickled."""
        _refuse()

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape of the whole tensor and of this rank's rows."""
        return f"RowShard(shape={tuple(self.shape)}, local={tuple(self.local.shape)}, dtype={self.dtype})"


def _refuse() -> NoReturn:
    raise UsageError(
        "with shard_optimizer, each rank has the optimizer's state of some parameters only: save it with "
        "strategy.checkpoint or strategy.save, which write all of it."
    )


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor that is sharded, else the tensor itself."""
    return tensor.local if isinstance(tensor, RowShard) else tensor


def shards_of(tensor: Tensor) -> Sequence[Tensor]:
    """Return the rows of all ranks in order; on the meta device, except this rank's."""
    if not isinstance(tensor, RowShard):
        return (tensor,)
    return [
        tensor.local
        if rank == tensor.rank
        else torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        for rank, count in enumerate(tensor.counts)
    ]
