"""``RowGather``: gives all ranks the rows of weights that each rank has updated.

They go through flat buffers of bounded size; but those of large weights in place, where the backend does that faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from unitrain.communication.backend import Divided
from unitrain.communication.communicator import Communicator

# Of all ranks together; one message is on its way while the one before is unpacked.
BUFFER_BYTES = 2**24
IN_PLACE_BYTES = 2**27  # Horovod packs as much into one message
LARGE = 2**16  # of a rank's rows of a weight, on average; a message takes as long as a few times of this
TOO_LARGE = 2**31  # of a weight, to be gathered in place: MPI counts in 32 bits

Rows = tuple[Tensor, Sequence[int]]
"""A weight whose rows are blocks of memory, and the number of rows of each rank."""


class RowGather:
    """Gathers rows of weights in place.

    Args:
        communicator: the communicator of this process.
        weights: the same on all ranks, except for their values. Their memory must not move.
        name: identifies the collectives; the same on all ranks.
    """

    def __init__(self, communicator: Communicator, weights: Iterable[Rows], name: str) -> None:
        self._communicator = communicator
        self._messages: list[_InPlace | _Bucket] = []
        ranks, rank, device = communicator.world_size, communicator.rank, communicator.device
        open_ones: dict[torch.dtype, _Bucket] = {}
        in_place: _InPlace | None = None
        for weight, counts in weights:
            large = LARGE * ranks <= weight.nbytes < TOO_LARGE
            if communicator.gathers_in_place and weight.device == device and large:
                if in_place is None or in_place.bytes + weight.nbytes > IN_PLACE_BYTES:
                    in_place = _InPlace(f"{name}.{len(self._messages)}")
                    self._messages.append(in_place)
                in_place.add(weight, counts)
                continue
            most = max(1, BUFFER_BYTES // (ranks * weight.element_size()))
            for pieces in _pieces(weight, counts, most):
                bucket = open_ones.get(weight.dtype)
                if bucket is None or bucket.length + max(map(len, pieces)) > most:
                    bucket = open_ones[weight.dtype] = _Bucket(f"{name}.{len(self._messages)}", rank, ranks, device)
                    self._messages.append(bucket)
                bucket.add(pieces)

    @torch.no_grad()
    def __call__(self) -> None:
        """Overwrite the rows of other ranks by theirs. Collective."""
        finish: Callable[[], None] = lambda: None  # noqa: E731  (what was sent before)
        for one in self._messages:
            following = one.sent(self._communicator)
            finish()
            finish = following
        finish()


class _InPlace:
    """Weights that are gathered in place in one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._weights: list[Divided] = []
        self.bytes = 0  # of all ranks

    def add(self, weight: Tensor, counts: Sequence[int]) -> None:
        """Add a weight, given the number of rows of each rank."""
        parts = [rows.view(torch.uint8) for rows in _rows(weight, counts)]
        self._weights.append(Divided(_flat(weight).view(torch.uint8), parts))
        self.bytes += weight.nbytes

    def sent(self, communicator: Communicator) -> Callable[[], None]:
        """Start to gather, and return a function that waits."""
        return communicator.gather_in_place_async(self._weights, self._name)


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


def _rows(weight: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return a flat view of each rank's rows of a weight."""
    row = weight.numel() // len(weight)
    return list(torch.split(_flat(weight), [count * row for count in counts]))


def _flat(weight: Tensor) -> Tensor:
    """Return a flat view of a weight's memory."""
    return weight.detach().as_strided((weight.numel(),), (1,))


def _pieces(weight: Tensor, counts: Sequence[int], most: int) -> Iterable[list[Tensor]]:
    """Yield flat views of a weight, one for each rank at a time, of at most ``most`` elements each."""
    rows = _rows(weight, counts)
    for offset in range(0, max(map(len, rows)), most):
        yield [its[offset : offset + most] for its in rows]
