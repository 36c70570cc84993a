"""Checks that all ranks have the same model, by one gather of checksums of its parameters and buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unitrain.communication.communicator import Communicator
from unitrain.errors import CommunicationError
from unitrain.training.batch_norm.layers import is_unsynchronised

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**20


@torch.no_grad()
def check_in_sync(communicator: Communicator, module: nn.Module) -> None:
    """See ``Strategy.check_in_sync``. A shard is on no other rank, so there is nothing to compare it with."""
    local = [f"{name}.{key}" if name else key for name, layer in module.named_modules() if is_unsynchronised(layer)
             for key, _ in layer.named_buffers()]  # fmt: skip
    named = [(n, t) for n, t in (*module.named_parameters(), *module.named_buffers())
             if n not in set(local) and not communicator.is_sharded(t)]  # fmt: skip
    if communicator.world_size == 1 or not named:
        return
    ours = torch.stack([_checksum(tensor).to(communicator.device) for _, tensor in named])
    everyone = communicator.all_gather(ours).cpu()
    for i, (name, tensor) in enumerate(named):
        ranks = [rank for rank in range(1, communicator.world_size) if everyone[rank, i] != everyone[0, i]]
        if ranks:
            raise CommunicationError(
                f"the ranks' models differ: {name} {tuple(tensor.shape)} of rank {', '.join(map(str, ranks))} is not "
                "that of rank 0. It was changed on some ranks only: by a step outside strategy.step, by random numbers "
                "that differ between ranks, or by loading weights on one rank."
            )


def _checksum(tensor: Tensor) -> Tensor:
    """Return a 64-bit checksum of a tensor's bits, which depends on their positions, on its device."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = plain.detach().contiguous().reshape(-1).view(_BITS[plain.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        # Odd multipliers, spread by the golden ratio, also detect swaps, and changes that cancel in a plain sum.
        place = torch.arange(start, start + part.numel(), device=tensor.device)
        total += (part * (place * -7046029254386353131 | 1)).sum()
    return total
