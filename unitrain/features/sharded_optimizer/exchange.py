"""``Exchange``: sends the parameters that each rank has updated to all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator
from unitrain.communication.state_transfer import in_chunks

LARGE = 2**20  # bytes of a parameter that is sent from and into its own memory, without a copy
BUFFER_BYTES = 2**24  # of all ranks together; one buffer is on its way while the one before is copied
CALL_BYTES = 2**18  # what takes about as long to send as a call does
PIECE_BYTES = 2**30  # MPI counts in 32 bits

Finish = Callable[[], None]
"""Waits until parameters have arrived."""


class Exchange:
    """Overwrites parameters on all ranks: each rank sends those that it owns.

    ``owned`` has the parameters of each rank; ``name`` identifies the collectives. Both are the same on all ranks.
    """

    def __init__(self, communicator: Communicator, owned: Sequence[Sequence[Tensor]], name: str) -> None:
        self._collectives = communicator.collectives
        self._large: list[Callable[[], Finish]] = []
        self._small: list[Callable[[], Finish]] = []
        small: dict[torch.dtype, list[list[Tensor]]] = defaultdict(lambda: [[] for _ in owned])
        for owner, parameters in enumerate(owned):
            for p in filter(Tensor.numel, parameters):
                if p.nbytes >= LARGE or p.device != communicator.device:
                    self._large.append(partial(self._broadcast, [p], owner, f"{name}.large.{len(self._large)}"))
                else:
                    small[p.dtype][owner].append(p)
        for by_rank in small.values():
            most = BUFFER_BYTES // len(owned)
            chunks = [in_chunks(parameters, lambda p: p.nbytes, most) for parameters in by_rank]
            for of_ranks in zip_longest(*chunks, fillvalue=[]):
                self._add(of_ranks, f"{name}.{len(self._small)}")

    def _add(self, of_ranks: Sequence[list[Tensor]], name: str) -> None:
        """Send small parameters of one dtype in one call, or in one call a rank, whichever takes less time."""
        sizes = [sum(p.nbytes for p in parameters) for parameters in of_ranks]
        # A gather sends as much for each rank as for the one that owns most; broadcasts cost a call each.
        if len(sizes) * max(sizes) <= sum(sizes) + sum(map(bool, sizes)) * CALL_BYTES:
            self._small.append(partial(self._gather, of_ranks, max(sizes), name))
            return
        for owner, parameters in enumerate(of_ranks):
            if parameters:
                self._small.append(partial(self._broadcast, parameters, owner, f"{name}.{owner}"))

    @torch.no_grad()
    def __call__(self) -> None:
        """Overwrite the parameters. Collective."""
        # First the large ones, which need no buffer: they are on their way while small ones are packed and copied.
        finishes = [start() for start in self._large]
        finish: Finish = lambda: None  # noqa: E731  (what was sent before)
        for start in self._small:
            following = start()
            finish()
            finish = following
        for wait in (finish, *finishes):
            wait()

    def _broadcast(self, parameters: list[Tensor], owner: int, name: str) -> Finish:
        ranks, first = self._collectives, parameters[0]
        in_place = len(parameters) == 1 and first.is_contiguous() and first.device == ranks.device
        if in_place:
            flat = first.detach().view(-1)
        elif owner == ranks.rank:
            flat = _packed(parameters).to(ranks.device)
        else:
            flat = torch.empty(sum(p.numel() for p in parameters), dtype=first.dtype, device=ranks.device)
        pieces = torch.split(flat.view(torch.uint8), PIECE_BYTES)
        waits = [ranks.broadcast_async(piece, owner, f"{name}.{i}") for i, piece in enumerate(pieces)]

        def finish() -> None:
            for wait in waits:
                wait()
            if not in_place and owner != ranks.rank:
                _unpack(flat, parameters)

        return finish

    def _gather(self, of_ranks: Sequence[list[Tensor]], size: int, name: str) -> Finish:
        ranks = self._collectives
        mine = of_ranks[ranks.rank]
        padding = torch.empty(size - sum(p.nbytes for p in mine), dtype=torch.uint8, device=ranks.device)
        packed = [_packed(mine).view(torch.uint8)] if mine else []
        wait = ranks.all_gather_async(torch.cat([*packed, padding]), name)

        def finish() -> None:
            gathered = wait()
            for rank, parameters in enumerate(of_ranks):
                if parameters and rank != ranks.rank:
                    _unpack(gathered[rank].view(parameters[0].dtype), parameters)

        return finish


def _packed(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in parameters])


def _unpack(flat: Tensor, parameters: list[Tensor]) -> None:
    """Overwrite parameters with those that another rank has ``_packed``."""
    sizes = [p.numel() for p in parameters]
    parts = torch.split(flat[: sum(sizes)], sizes)
    torch._foreach_copy_(parameters, [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)])
