"""``Exchange``: sends the parameters that each rank has updated to all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unitrain.communication.communicator import Communicator

LARGE = 2**20  # bytes of a parameter that is sent from and into its own memory, without a copy
PIECE_BYTES = 2**30  # MPI counts in 32 bits


class Exchange:
    """Overwrites parameters on all ranks: each rank sends those that it owns, small ones of a dtype together.

    ``owned`` has the parameters of each rank; ``name`` identifies the collectives. Both are the same on all ranks.
    """

    def __init__(self, communicator: Communicator, owned: Sequence[Sequence[Tensor]], name: str) -> None:
        self._collectives = communicator.collectives
        self._name = name
        large: list[tuple[int, list[Tensor]]] = []  # with their owners
        small: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        for owner, parameters in enumerate(owned):
            for p in filter(Tensor.numel, parameters):
                if p.nbytes >= LARGE or p.device != communicator.device:
                    large.append((owner, [p]))
                else:
                    small[owner, p.dtype].append(p)
        # First the large ones, which need no buffer: they are on their way while small ones are packed.
        self._sent = [*large, *((owner, together) for (owner, _), together in small.items())]

    @torch.no_grad()
    def __call__(self) -> None:
        """Overwrite the parameters. Collective."""
        finishes = [self._broadcast(sent, owner, f"{self._name}.{i}") for i, (owner, sent) in enumerate(self._sent)]
        for finish in finishes:
            finish()

    def _broadcast(self, parameters: list[Tensor], owner: int, name: str) -> Callable[[], None]:
        """Begin to send parameters of one dtype. Return a function that waits until they have arrived."""
        ranks, first = self._collectives, parameters[0]
        in_place = len(parameters) == 1 and first.is_contiguous() and first.device == ranks.device
        sizes = [p.numel() for p in parameters]
        if in_place:
            flat = first.detach().view(-1)
        elif owner == ranks.rank:
            flat = torch.cat([p.reshape(-1) for p in parameters]).to(ranks.device)
        else:
            flat = torch.empty(sum(sizes), dtype=first.dtype, device=ranks.device)
        pieces = torch.split(flat.view(torch.uint8), PIECE_BYTES)
        waits = [ranks.broadcast_async(piece, owner, f"{name}.{i}") for i, piece in enumerate(pieces)]

        def finish() -> None:
            for wait in waits:
                wait()
            if not in_place and owner != ranks.rank:
                parts = zip(torch.split(flat, sizes), parameters, strict=True)
                torch._foreach_copy_(parameters, [part.view(p.shape) for part, p in parts])

        return finish
