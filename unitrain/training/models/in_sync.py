"""Checks that all ranks have the same model, by one gather of checksums of its parameters and buffers.

Every training epoch ends with this check, and with a comparison of the optimizers' options: ranks that have drifted
apart go on averaging gradients of different models without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.errors import CommunicationError
from unitrain.training.batch_norm.layers import is_unsynchronised
from unitrain.training.hooks import StepHook
from unitrain.training.models.comparison import check_optimizers
from unitrain.training.models.prepared import PreparedModules

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**20
_CHUNK_IN_CACHE = 2**14  # ten times as fast on a CPU
_FACTOR = 6364136223846793005  # odd; of a linear congruential generator (Knuth)


class InSyncCheck(StepHook):
    """Checks all prepared models, and the options of all optimizers, at the end of each training epoch.

    Args:
        communicator: the communicator of this process.
        prepared: the prepared modules.
        optimizers: returns the optimizers of the run.
    """

    def __init__(
        self, communicator: Communicator, prepared: PreparedModules, optimizers: Callable[[], list[Optimizer]]
    ) -> None:
        self._communicator = communicator
        self._prepared = prepared
        self._optimizers = optimizers

    def at_epoch_end(self) -> None:
        """Check the models and the optimizers. Collective."""
        self.check_models()
        for optimizer in self._optimizers():
            check_optimizers(self._communicator, self._prepared, optimizer, options=True)

    def check_models(self) -> None:
        """Check the models. Collective."""
        for module in self._prepared:
            check_in_sync(self._communicator, self._prepared.unwrap(module))


class FrequentCheck(StepHook):
    """Checks all prepared models every few steps (``check_in_sync_every``).

    Args:
        check: checks them.
        communicator: counts the steps.
        every: number of steps from one check to the next.
    """

    def __init__(self, check: InSyncCheck, communicator: Communicator, every: int) -> None:
        self._check = check
        self._pulse = communicator.pulse
        self._every = every

    def after_update(self, optimizer: Optimizer, parameters: Sequence[Parameter], stepped: bool) -> None:
        """Check the models if this is the step for it. Collective."""
        if (self._pulse.step + 1) % self._every == 0:
            self._check.check_models()


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
    parts = bits.split(_CHUNK if tensor.is_cuda else _CHUNK_IN_CACHE)
    # Odd multipliers, spread by the golden ratio, also detect swaps, and changes that cancel in a plain sum.
    odd = torch.arange(len(parts[0]), device=tensor.device) * -7046029254386353131 | 1
    for part in parts:
        total = total * _FACTOR + (part * odd[: len(part)]).sum()
    return total
