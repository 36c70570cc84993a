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
        self._slots: list[_Slot] = []
        self._seen: list[tuple[Tensor, int]] = []
        self._moving: list[_Slot] = []
        self._agreed: Callable[[], list[int]] | None = None
        self._waits = False  # in the second step of a module

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer, parameters: Sequence[Parameter], stepped: bool) -> None:
        """Broadcast the buffers that a forward has changed. Collective."""
        new = self._new_slots()
        if not self._slots and not new:
            return
        if self._agreed is not None:
            self._add_moving(self._agreed())
            self._agreed = None
        now = [slot.tensor for slot in self._slots]
        if now:
            changed = [one is not seen or one._version != v for one, (seen, v) in zip(now, self._seen, strict=True)]
            self._agreed = self._changes.start(changed)
            if self._waits:
                self._add_moving(self._agreed())
                self._agreed = None
        self._slots += new
        self._waits = bool(new)
        buffers = [slot.tensor for slot in self._moving + new]
        broadcast_tensors(self._communicator, buffers, buffers)
        now += [slot.tensor for slot in new]
        self._seen = [(one, one._version) for one in now]

    def _new_slots(self) -> list[_Slot]:
        """Return the buffers of modules that were prepared since the last step."""
        new = [module for module in self._prepared if module not in self._modules]
        self._modules.update(new)
        return [slot for module in new for slot in _slots(module)]

    def _add_moving(self, changed: list[int]) -> None:
        known = set(self._moving)
        self._moving += [slot for slot, moved in zip(self._slots, changed, strict=True) if moved and slot not in known]


def _slots(module: nn.Module) -> Iterator[_Slot]:
    """Yield the buffers of a module that are saved with it. Others are scratch memory, or constants."""
    for layer in module.modules():
        if not isinstance(layer, _BatchNorm):
            saved = nn.Module.state_dict(layer, keep_vars=True)  # also where a model overrides it
            for name, buffer in layer.named_buffers(recurse=False):
                if name in saved and buffer.numel():
                    yield _Slot(layer, name)
