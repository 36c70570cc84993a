"""``RowGather``: gives all ranks the rows of weights that each rank has updated, in flat buffers of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from unitrain.communicator import Communicator

BUFFER_BYTES = 2**24  # of all ranks together; one buffer is on its way while the one before is unpacked

Rows = tuple[Tensor, Sequence[int]]
"""A weight whose rows are blocks of memory, and the number of rows of each rank."""


class RowGather:
    """Gathers rows of weights in place.

    Args:
        communicator: the communicator of this process.
        weights: the same on all ranks, except for their values. Their memory must not move.
        name: identifies the collectives; the same on all ranks.
        buffer_bytes: maximum size of a buffer.
    """

    def __init__(
        self, communicator: Communicator, weights: Iterable[Rows], name: str, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self._communicator = communicator
        self._buckets: list[_Bucket] = []
        ranks, rank, device = communicator.world_size, communicator.rank, communicator.device
        open_ones: dict[torch.dtype, _Bucket] = {}
        for weight, counts in weights:
            most = max(1, buffer_bytes // (ranks * weight.element_size()))
            for pieces in _pieces(weight, counts, most):
                bucket = open_ones.get(weight.dtype)
                if bucket is None or bucket.length + max(map(len, pieces)) > most:
                    bucket = open_ones[weight.dtype] = _Bucket(f"{name}.{len(self._buckets)}", rank, ranks, device)
                    self._buckets.append(bucket)
                bucket.add(pieces)

    @torch.no_grad()
    def __call__(self) -> None:
        """Overwrite the rows of other ranks by theirs. Collective."""
        unpack: Callable[[], None] = lambda: None  # noqa: E731  (of the bucket before)
        for bucket in self._buckets:
            following = bucket.sent(self._communicator)
            unpack()
            unpack = following
        unpack()


class _Bucket:
    """Pieces of weights of one dtype that are gathered in one collective."""

    def __init__(self, name: str, rank: int, ranks: int, device: torch.device) -> None:
        self._name = name
        self._rank = rank
        self._device = device
        self._pieces: list[list[Tensor]] = [[] for _ in range(ranks)]
        self._sizes: list[list[int]] = [[] for _ in range(ranks)]
        self.length = 0  # elements of the rank that has the most

    def add(self, pieces: Sequence[Tensor]) -> None:
        """Add a flat view for each rank."""
        for rank, piece in enumerate(pieces):
            if len(piece):
                self._pieces[rank].append(piece)
                self._sizes[rank].append(len(piece))
        self.length = max(map(sum, self._sizes))

    def sent(self, communicator: Communicator) -> Callable[[], None]:
        """Start to gather, and return a function that waits and unpacks."""
        dtype = next(piece for pieces in self._pieces for piece in pieces).dtype
        buffer = torch.empty(self.length, dtype=dtype, device=self._device)
        own, sizes = self._pieces[self._rank], self._sizes[self._rank]
        if own:
            torch._foreach_copy_(torch.split(buffer[: sum(sizes)], sizes), own)
        wait = communicator.all_gather_async(buffer.view(torch.uint8), self._name)

        def unpack() -> None:
            gathered = wait().view(dtype)
            for rank, (targets, its) in enumerate(zip(self._pieces, self._sizes, strict=True)):
                if targets and rank != self._rank:
                    torch._foreach_copy_(targets, torch.split(gathered[rank, : sum(its)], its))

        return unpack


def _pieces(weight: Tensor, counts: Sequence[int], most: int) -> Iterable[list[Tensor]]:
    """Yield flat views of a weight, one for each rank at a time, of at most ``most`` elements each."""
    row = weight.numel() // len(weight)
    flat = weight.detach().as_strided((weight.numel(),), (1,))
    ends = list(accumulate(count * row for count in counts))
    starts = [0, *ends[:-1]]
    for offset in range(0, max(counts) * row, most):
        yield [
            flat[min(start + offset, end) : min(start + offset + most, end)]
            for start, end in zip(starts, ends, strict=True)
        ]
