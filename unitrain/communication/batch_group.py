"""``BatchGroup``: ranks that get the same batches, and compute with parts of each sample."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unitrain.communication.communicator import Communicator
from unitrain.communication.gathering import differentiable_rows
from unitrain.errors import UsageError


class BatchGroup:
    """The ranks that get the same batches, and compute with parts of each sample. By default, this rank alone.

    All ranks of a group call ``gather`` and ``sum`` in the same order, and their tensors require grad on all of them or
    on none, since the backward is collective, too. In a group of one, they return the tensor.

    Args:
        communicator: of the group; None for this rank alone.

    Attributes:
        rank: number of this process in the group, and of its part.
        size: number of ranks in the group, and of parts.

    Example:
        >>> group = strategy.batch_group
        >>> loss = criterion(model(group.part(images, 2)), group.part(targets, 2))
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self._communicator = communicator
        self.rank: int = 0 if communicator is None else communicator.rank
        self.size: int = 1 if communicator is None else communicator.world_size

    def span(self, length: int) -> slice:
        """Return which elements of a dimension are this rank's part. The last parts may be shorter, by one element.

        Args:
            length: size of the dimension.
        """
        sizes = self._sizes(length)
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor, a view. Not collective.

        Args:
            tensor: the whole, as all ranks of the group have it.
            dim: the dimension that is divided.
        """
        span = self.span(tensor.shape[dim])
        return tensor.narrow(dim, span.start, span.stop - span.start)

    def gather(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        """Return the parts of all ranks, concatenated: the inverse of ``part``. Collective in the group.

        In the backward, each rank gets the sum of the ranks' gradients of its part.

        Args:
            tensor: this rank's part, of the same dtype and other sizes on all ranks.
            dim: the dimension that is divided.
            length: size of the whole in it. So the ranks need not exchange the sizes of their parts.

        Raises:
            UsageError: this rank's part has another size than ``part`` would give it.
        """
        if self._communicator is None:
            return tensor
        rows = tensor.movedim(dim, 0)
        sizes = self._sizes(length)
        if len(rows) != sizes[self.rank]:
            raise UsageError(
                f"gather() was given {len(rows)} of {length} elements of dimension {dim} on rank {self.rank} of its "
                f"group, where part() has {sizes[self.rank]}."
            )
        return differentiable_rows(self._communicator, rows, sizes).movedim(0, dim)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the element-wise sum of the ranks' tensors. Collective in the group.

        In the backward, each rank gets the sum of the ranks' gradients.

        Args:
            tensor: of the same dtype and shape on all ranks.
        """
        return tensor if self._communicator is None else cast(Tensor, _Sum.apply(tensor, self._communicator))

    def _sizes(self, length: int) -> list[int]:
        """Return the sizes of the ranks' parts of a dimension."""
        size, rest = divmod(length, self.size)
        return [size + (rank < rest) for rank in range(self.size)]


class _Sum(torch.autograd.Function):
    """The sum of the ranks' tensors, and of their gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communicator: Communicator) -> Tensor:
        ctx.communicator = communicator
        return communicator.all_reduce(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.communicator.all_reduce(grad), None
