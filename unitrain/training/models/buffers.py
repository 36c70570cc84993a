"""Gives all ranks rank 0's values of buffers that a forward changes: codebooks, moving averages, counters.

torch's DDP broadcasts every buffer before each forward; here only those that have changed on some rank are broadcast,
after the step. Statistics of normalisation layers are not among them: they are synchronised, or averaged for an
evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.communication.counts import CountReduction
from unitrain.communication.state_transfer import SentState, broadcast_tensors, outline
from unitrain.training.hooks import StepHook
from unitrain.training.models.batch_norm import has_statistics
from unitrain.training.models.prepared import PreparedModules, present

_SAME, _CHANGED, _RESHAPED = 0, 1, 2


@dataclass(eq=False, slots=True)
class _Slot:
    """A buffer of a layer, which may assign another tensor to it.

    Attributes:
        layer: a reference to the layer, which is freed when the script drops it.
        name: of the buffer.
        tensor: the buffer after the last step. All ranks have the same shape and dtype here.
        now: the buffer as the last forward has left it.
        version: of the tensor.
        varies: whether its shape or dtype has changed on some rank, or it was None.
    """

    layer: ref[nn.Module]
    name: str
    tensor: Tensor | None = None
    now: Tensor | None = None
    version: int = -1
    varies: bool = False

    def look(self) -> int:
        """Return how the buffer has changed since the last step."""
        layer = self.layer()
        now = self.now = self.tensor if layer is None else getattr(layer, self.name, None)
        if now is self.tensor:
            return _SAME if now is None or now._version == self.version else _CHANGED
        if now is not None and layer is not None:
            self.now = _writable(layer, self.name, now)
        return _CHANGED if self._fits() else _RESHAPED

    def _fits(self) -> bool:
        old, new = self.tensor, self.now
        return old is not None and new is not None and (old.shape, old.dtype) == (new.shape, new.dtype)

    @property
    def target(self) -> Tensor:
        """What rank 0's values are copied to: the buffer, or, until all ranks know its new shape, the one before."""
        target = self.now if self._fits() else self.tensor
        assert target is not None
        return target

    def remember(self) -> None:
        """Record the buffer after a step."""
        if self._fits():
            self.tensor = self.now
        if self.tensor is not None:
            self.version = self.tensor._version

    def replace(self, tensor: Tensor | None) -> None:
        """Record rank 0's buffer, and assign it to the layer."""
        layer = self.layer()
        if layer is not None and tensor is not self.now:
            setattr(layer, self.name, tensor)
        self.tensor = self.now = tensor


class BufferSync(StepHook):
    """Broadcasts changed buffers of the prepared modules after each step.

    A buffer's version tells whether it has changed. The ranks agree on that in a small all-reduce, which overlaps the
    next step: a buffer that changes for the first time after the second step, or has another shape then, is broadcast
    one step later. A buffer of changing shapes, as a bank of features that grows, is sent with its shape.
    """

    place = 20

    def __init__(self, communicator: Communicator, prepared: PreparedModules) -> None:
        self._communicator = communicator
        self._prepared = prepared
        self._changes = CountReduction(communicator, "max", "changed buffers")
        self._prepared_before = 0
        self._layers: WeakSet[nn.Module] = WeakSet()
        self._slots: list[_Slot] = []  # all buffers that are watched
        self._moving: list[_Slot] = []  # those that a forward has changed on some rank
        self._agreed: Callable[[], list[int]] | None = None
        self._waits = False  # in the second step of a module

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer, parameters: Sequence[Parameter], stepped: bool) -> None:
        """Broadcast the buffers that a forward has changed. Collective."""
        grows = self._prepared.count != self._prepared_before
        if not self._slots and not grows:
            return
        self._settle()
        if grows:
            self._drop_freed()
        changes = [slot.look() for slot in self._slots]
        if changes:
            self._agreed = self._changes.start(changes)
            if self._waits or grows:  # before the list of buffers grows, which the ranks have agreed on
                self._settle()
        self._send(self._new_slots() if grows else [])
        self._waits = grows

    @torch.no_grad()
    def at_epoch_end(self) -> None:
        """Broadcast what the last step has changed for the first time, before the ranks' models are compared."""
        if self._agreed is not None:
            self._settle()
            self._send([])

    def _send(self, new: list[_Slot]) -> None:
        """Broadcast the moving buffers and new ones, which the ranks may have other values of. Collective."""
        self._slots += new
        buffers = [slot.target for slot in self._moving if not slot.varies]
        broadcast_tensors(self._communicator, buffers, buffers)
        if varying := [slot for slot in self._moving if slot.varies] + new:
            sent = [slot.now for slot in varying]
            forms = self._communicator.broadcast_data(outline(sent))
            device = self._communicator.device
            received = SentState(self._communicator, forms, sent).receive(sent, lambda path, form: form.empty(device))
            for slot, tensor in zip(varying, received, strict=True):
                slot.replace(tensor)
        for slot in self._slots:
            slot.remember()  # after the broadcast, which changes versions

    def _drop_freed(self) -> None:
        """Forget the buffers of layers that a rank has freed. Collective."""
        layers = present(self._communicator, [slot.layer for slot in self._slots])
        self._slots = [slot for slot, layer in zip(self._slots, layers, strict=True) if layer is not None]
        self._moving = [slot for slot in self._moving if slot in self._slots]

    def _new_slots(self) -> list[_Slot]:
        """Return the buffers of layers that were prepared since the last step. Collective."""
        self._prepared_before = self._prepared.count
        modules = self._prepared.on_all_ranks(self._communicator)
        layers = [layer for module in modules for layer in module.modules() if layer not in self._layers]
        self._layers.update(layers)
        slots = [slot for layer in layers for slot in _slots(layer)]
        for slot in slots:
            slot.look()
        return slots

    def _settle(self) -> None:
        """Wait until the ranks know which buffers have changed on any of them. These are broadcast from now on."""
        if self._agreed is not None:
            known = set(self._moving)
            for slot, change in zip(self._slots, self._agreed(), strict=True):
                if change and slot not in known:
                    self._moving.append(slot)
                slot.varies |= change == _RESHAPED
            self._agreed = None


def make_writable(module: nn.Module) -> None:
    """Replace the buffers of a module that torch can't copy values into by copies."""
    for layer in module.modules():
        for name, buffer in layer.named_buffers(recurse=False):
            _writable(layer, name, buffer)


def _writable(layer: nn.Module, name: str, buffer: Tensor) -> Tensor:
    """Return a buffer of a layer, or the copy that replaces it: several elements may share memory (by ``expand``)."""
    overlaps = any(not step and size > 1 for size, step in zip(buffer.shape, buffer.stride(), strict=True))
    if overlaps or buffer.is_inference():
        buffer = buffer.clone(memory_format=torch.contiguous_format)
        setattr(layer, name, buffer)
    return buffer


def _slots(layer: nn.Module) -> Iterator[_Slot]:
    """Yield the buffers of a layer that are saved with it. Others are scratch memory, or constants."""
    if not has_statistics(layer):
        saved = nn.Module.state_dict(layer, keep_vars=True)  # also where a model overrides it
        for name, buffer in layer._buffers.items():
            if name in saved or (buffer is None and name not in layer._non_persistent_buffers_set):
                yield _Slot(ref(layer), name)
