"""Gives all ranks rank 0's values of buffers that a forward changes: codebooks, moving averages, counters.

torch's DDP broadcasts every buffer before each forward; here only those that have changed on some rank are broadcast,
after the step. BatchNorm's statistics are not among them: they are synchronised, or averaged for an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.communication.counts import CountReduction
from unitrain.communication.state_transfer import broadcast_tensors
from unitrain.training.hooks import StepHook
from unitrain.training.models.prepared import PreparedModules


class _Slot(NamedTuple):
    """A buffer of a layer, which may assign another tensor to it."""

    layer: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        return cast(Tensor, getattr(self.layer, self.name))


class BufferSync(StepHook):
    """Broadcasts changed buffers of the prepared modules after each step.

    A buffer's version tells whether it has changed. The ranks agree on that in a small all-reduce, which overlaps the
    next step: a buffer that changes for the first time after the second step is broadcast one step later.
    """

    place = 20

    def __init__(self, communicator: Communicator, prepared: PreparedModules) -> None:
        self._communicator = communicator
        self._prepared = prepared
        self._changes = CountReduction(communicator, "max", "changed buffers")
        self._modules: set[nn.Module] = set()
        self._slots: list[_Slot] = []  # all buffers that are watched
        self._seen: list[tuple[Tensor, int]] = []  # the tensor of each after the last step, and its version
        self._moving: list[_Slot] = []  # those that a forward has changed on some rank
        self._agreed: Callable[[], list[int]] | None = None
        self._waits = False  # in the second step of a module

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer, parameters: Sequence[Parameter], stepped: bool) -> None:
        """Broadcast the buffers that a forward has changed. Collective."""
        new = self._new_slots()
        if not self._slots and not new:
            return
        self._settle()
        tensors = [slot.tensor for slot in self._slots]
        if tensors:
            pairs = zip(tensors, self._seen, strict=True)
            changed = [tensor is not seen or tensor._version != version for tensor, (seen, version) in pairs]
            self._agreed = self._changes.start(changed)
            if self._waits or new:  # before the list of buffers grows, which the ranks have agreed on
                self._settle()
        self._slots += new
        self._waits = bool(new)
        buffers = [slot.tensor for slot in self._moving + new]
        broadcast_tensors(self._communicator, buffers, buffers)
        tensors += [slot.tensor for slot in new]
        self._seen = [(tensor, tensor._version) for tensor in tensors]  # after the broadcast, which changes versions

    def _new_slots(self) -> list[_Slot]:
        """Return the buffers of modules that were prepared since the last step. Ranks may have other values of them."""
        new = [module for module in self._prepared if module not in self._modules]
        self._modules.update(new)
        return [slot for module in new for slot in _slots(module)]

    def _settle(self) -> None:
        """Wait until the ranks know which buffers have changed on any of them. These are broadcast from now on."""
        if self._agreed is not None:
            known = set(self._moving)
            pairs = zip(self._slots, self._agreed(), strict=True)
            self._moving += [slot for slot, moved in pairs if moved and slot not in known]
            self._agreed = None


def _slots(module: nn.Module) -> Iterator[_Slot]:
    """Yield the buffers of a module that are saved with it. Others are scratch memory, or constants."""
    for layer in module.modules():
        if not isinstance(layer, _BatchNorm):
            saved = nn.Module.state_dict(layer, keep_vars=True)  # also where a model overrides it
            for name, buffer in layer.named_buffers(recurse=False):
                if name in saved and buffer.numel():
                    yield _Slot(layer, name)
