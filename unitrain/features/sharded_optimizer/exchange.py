"""``Exchange``: sends the parameters that each rank has updated to all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator

LARGE = 2**20  # bytes of a parameter that is sent from and into its own memory, without a copy
PIECE_BYTES = 2**30  # MPI counts in 32 bits

Finish = Callable[[], None]
"""Waits until parameters have arrived."""


class Exchange:
    """Overwrites parameters on all ranks: each rank sends those that it owns.

    ``owned`` has the parameters of each rank; ``name`` identifies the collectives. Both are the same on all ranks.
    """

    def __init__(self, communicator: Communicator, owned: Sequence[Sequence[Tensor]], name: str) -> None:
        self._collectives = communicator.collectives
        large: list[tuple[list[Tensor], int]] = []
        small: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        for owner, parameters in enumerate(owned):
            for p in filter(Tensor.numel, parameters):
                if p.nbytes >= LARGE or p.device != communicator.device:
                    large.append(([p], owner))
                else:
                    small[owner, p.dtype].append(p)
        # First the large ones, which need no buffer: they are on their way while small ones are packed.
        sent = [*large, *((together, owner) for (owner, _), together in small.items())]
        self._starts = [
            partial(self._broadcast, parameters, owner, f"{name}.{i}") for i, (parameters, owner) in enumerate(sent)
        ]

    @torch.no_grad()
    def __call__(self) -> None:
        """Overwrite the parameters. Collective."""
        for finish in [start() for start in self._starts]:
            finish()

    def _broadcast(self, parameters: list[Tensor], owner: int, name: str) -> Finish:
        ranks, first = self._collectives, parameters[0]
        in_place = len(parameters) == 1 and first.is_contiguous() and first.device == ranks.device
        if in_place:
            flat = first.detach().view(-1)
        elif owner == ranks.rank:
            flat = torch.cat([p.reshape(-1) for p in parameters]).to(ranks.device)
        else:
            flat = torch.empty(sum(p.numel() for p in parameters), dtype=first.dtype, device=ranks.device)
        pieces = torch.split(flat.view(torch.uint8), PIECE_BYTES)
        waits = [ranks.broadcast_async(piece, owner, f"{name}.{i}") for i, piece in enumerate(pieces)]

        def finish() -> None:
            for wait in waits:
                wait()
            if not in_place and owner != ranks.rank:
                parts = torch.split(flat, [p.numel() for p in parameters])
                torch._foreach_copy_(
                    parameters, [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
                )

        return finish
