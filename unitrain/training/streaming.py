"""Broadcasts tensors in small buffers, whatever their sizes, and the nested state that holds them.

At most one buffer of the state is held twice. On a GPU, only that buffer passes through its memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from unitrain import plain_data
from unitrain.communicator import Communicator

BUFFER_BYTES = 2**21  # larger ones cost more memory than their size: allocators and gloo keep several
_ALIGNMENT = 16  # of the largest dtype, complex128
_CPU = torch.device("cpu")

Keys = tuple[Any, ...]
"""The keys and positions that lead to a value in nested state."""
Sent = Callable[[], object]
"""Called on the sending rank when a buffer has been filled."""


class Form:
    """Shape, dtype and memory format of a tensor, which stands for it in an outline."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.dtype: torch.dtype = tensor.dtype
        self._stride: tuple[int, ...] = torch.empty_like(tensor, device="meta").stride()  # without gaps

    def fits(self, value: object) -> bool:
        """Return whether a tensor of this form can be copied into ``value``."""
        return (
            _is_dense(value)
            and (tuple(value.shape), value.dtype) == (self.shape, self.dtype)
            and all(stride or size < 2 for size, stride in zip(value.shape, value.stride(), strict=True))
        )

    def empty(self, device: torch.device) -> Tensor:
        """Return a new tensor of this form."""
        return torch.empty_strided(self.shape, self._stride, dtype=self.dtype, device=device)


def _form(plain: tuple[Keys, torch.dtype, Keys]) -> Form:
    shape, dtype, stride = plain
    return Form(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))


plain_data.register(Form, lambda form: (form.shape, form.dtype, form._stride), _form)


def outline(state: Any) -> Any:
    """Return nested state with the forms of its dense tensors instead of the tensors."""
    return _mapped(state, lambda value: Form(value) if _is_dense(value) else value)


def receive(
    communicator: Communicator,
    expected: Any,
    source: Any,
    *,
    src: int = 0,
    own: Any = None,
    device: Callable[[Keys, Form], torch.device] = lambda path, form: _CPU,
    sent: Sent = lambda: None,
) -> Any:
    """Return rank ``src``'s nested state on every rank. Collective.

    Args:
        communicator: the communicator of this process.
        expected: the outline of the state, the same on all ranks.
        source: the state; ignored on other ranks than ``src``.
        src: the rank that has the state.
        own: nested state of this rank. Its tensors are overwritten and returned, where they have the expected form.
        device: the device of a new tensor; the meta device for one that this rank does not need.
        sent: called on rank ``src`` when a buffer has been filled.
    """
    owned = dict(_leaves(own))
    targets = [
        owned[path] if form.fits(owned.get(path)) else form.empty(device(path, form))
        for path, form in _leaves(expected)
        if isinstance(form, Form)
    ]
    sends = communicator.rank == src
    sources = [value for _, value in _leaves(source) if _is_dense(value)] if sends else targets
    broadcast_tensors(communicator, targets, sources, src=src, sent=sent)
    filled = iter(targets)
    return _mapped(expected, lambda value: next(filled) if isinstance(value, Form) else value)


def receive_optimizer(
    communicator: Communicator, optimizer: Optimizer, expected: Any, source: Any, *, sent: Sent = lambda: None
) -> None:
    """Load rank 0's state into an optimizer, whose own state is overwritten in place. Collective.

    Args:
        communicator: the communicator of this process.
        optimizer: its parameter groups are like those of the state.
        expected: the outline of the state, the same on all ranks.
        source: the state; ignored on other ranks than 0.
        sent: called on rank 0 when a buffer has been filled.
    """
    # Optimizers number their parameters in order, so the numbers are those of the state.
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))

    def device(path: Keys, form: Form) -> torch.device:
        # The optimizer moves counts of steps itself, where it wants them on the device.
        parameter = parameters.get(path[1]) if len(path) == 3 and form.shape else None
        return _CPU if parameter is None else parameter.device

    own = optimizer.state_dict()
    optimizer.load_state_dict(receive(communicator, expected, source, own=own, device=device, sent=sent))


def _is_dense(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor that its form describes. Others are sent with the outline."""
    if type(value) is not Tensor:
        return False
    return value.layout == torch.strided and not (value.is_quantized or value.requires_grad)


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return nested state with each value that is not a dict, list or tuple replaced by ``leaf(value)``."""
    if isinstance(value, dict):
        made = copy.copy(value)  # keeps the versions of modules, which are an attribute of their OrderedDict
        made.update((key, _mapped(item, leaf)) for key, item in value.items())
        return made
    if isinstance(value, (list, tuple)):
        items = [_mapped(item, leaf) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return leaf(value)


def _leaves(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the values that are not a dict, list or tuple, in the order of ``_mapped``, and where they are."""
    if not isinstance(value, (dict, list, tuple)):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, (*path, key))


# ------------------------------------------------------------------------------------------------------- buffers


@torch.no_grad()
def broadcast_tensors(
    communicator: Communicator,
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    *,
    src: int = 0,
    sent: Sent = lambda: None,
) -> None:
    """Overwrite ``targets`` with rank ``src``'s ``sources``. Collective.

    Args:
        communicator: the communicator of this process.
        targets: dense tensors with the same shapes and dtypes on all ranks, on any device.
        sources: the tensors that are sent, which may be the targets; on other ranks any of these forms.
        src: the rank that sends.
        sent: called on rank ``src`` when a buffer has been filled.
    """
    sends = communicator.rank == src
    for pieces in _buffers(zip(targets, sources, strict=True)):
        buffer = torch.empty(_slots_end(pieces), dtype=torch.uint8, device=communicator.device)
        if sends:
            for (_, source), slot in _with_slots(pieces, buffer):
                slot.copy_(source)
            sent()
        buffer = communicator.broadcast(buffer, src)
        for (target, source), slot in _with_slots(pieces, buffer):
            if not (sends and _same_memory(target, source)):
                target.copy_(slot)


def _same_memory(target: Tensor, source: Tensor) -> bool:
    return not target.is_meta and target.data_ptr() == source.data_ptr()


Pieces = list[tuple[Tensor, Tensor]]
"""Views of targets and of their sources."""


def _buffers(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Pieces]:
    """Yield the pieces that share a buffer."""
    pieces: Pieces = []
    size = 0
    for pair in pairs:
        for piece in _pieces(*pair):
            length = _aligned(piece[0].nbytes)
            if pieces and size + length > BUFFER_BYTES:
                yield pieces
                pieces, size = [], 0
            pieces.append(piece)
            size += length
    if pieces:
        yield pieces


def _pieces(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of two tensors of one shape, each at most as large as a buffer."""
    if target.nbytes <= BUFFER_BYTES:
        yield target, source
    elif len(target) == 1:
        yield from _pieces(target[0], source[0])
    else:
        rows = max(1, BUFFER_BYTES * len(target) // target.nbytes)
        for pair in zip(torch.split(target, rows), torch.split(source, rows), strict=True):
            yield from _pieces(*pair)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _slots_end(pieces: Pieces) -> int:
    return sum(_aligned(target.nbytes) for target, _ in pieces)


def _with_slots(pieces: Pieces, buffer: Tensor) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Yield each piece with its part of the buffer, as a tensor of its shape and dtype."""
    start = 0
    for target, source in pieces:
        yield (target, source), buffer[start : start + target.nbytes].view(target.dtype).view(target.shape)
        start += _aligned(target.nbytes)
