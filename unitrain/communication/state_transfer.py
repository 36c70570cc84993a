"""Broadcasts tensors in small buffers, whatever their sizes, and the nested state that holds them.

At most one buffer of the state is held twice. On a GPU, only that buffer passes through its memory. Of a tensor that is
sharded, each rank keeps its own shard, and never has more of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from unitrain.communication import plain_data
from unitrain.communication.collectives import as_bytes
from unitrain.communication.communicator import Communicator

BUFFER_BYTES = 2**21  # larger ones cost more memory than their size: allocators and gloo keep several
T = TypeVar("T")
_CPU, _META = torch.device("cpu"), torch.device("meta")

Keys = tuple[Any, ...]
"""The keys and positions that lead to a value in nested state."""
New = Callable[[Keys, "Form"], Tensor]
"""Makes the tensor of a path and a form that is received."""
Sent = Callable[[], object]
"""Called on the sending rank when a buffer has been filled."""
Triples = Sequence[tuple[Keys, "Form", Tensor]]
"""Tensors with their paths and forms."""


class Form:
    """Shape, dtype and memory format of a tensor, which stands for it in an outline."""

    def __init__(self, tensor: Tensor, key: str | None = None) -> None:
        self.key: str | None = key  # what it is called where several ranks have written it, if they have
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.dtype: torch.dtype = tensor.dtype
        dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")  # which is slow
        self._stride: tuple[int, ...] = dense.stride()  # without gaps

    def describes(self, tensor: Tensor) -> bool:
        """Return whether a tensor has this shape and dtype."""
        return (tuple(tensor.shape), tensor.dtype) == (self.shape, self.dtype)

    def fits(self, value: object) -> TypeGuard[Tensor]:
        """Return whether a tensor of this form can be copied into ``value``."""
        return (
            _is_dense(value)
            and self.describes(value)
            and all(stride or size < 2 for size, stride in zip(value.shape, value.stride(), strict=True))
        )

    def empty(self, device: torch.device) -> Tensor:
        """Return a new tensor of this form."""
        return torch.empty_strided(self.shape, self._stride, dtype=self.dtype, device=device)


def _form(plain: tuple[Keys, torch.dtype, Keys, str | None]) -> Form:
    shape, dtype, stride, key = plain
    return Form(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), key)


plain_data.register(Form, lambda form: (form.shape, form.dtype, form._stride, form.key), _form)


def outline(state: Any) -> Any:
    """Return nested state with the forms of its dense tensors instead of the tensors."""
    return _mapped(state, lambda value: Form(value) if _is_dense(value) else value)


def needed(is_needed: Callable[[Keys], bool]) -> New:
    """Return a function that makes the tensors this rank needs on the CPU, and others on the meta device.

    Args:
        is_needed: whether this rank needs the tensor of a path.
    """
    return lambda path, form: form.empty(_CPU if is_needed(path) else _META)


@dataclass(eq=False)
class SentState:
    """Nested state that one rank has, and sends to all ranks.

    Attributes:
        communicator: the communicator of this process.
        outline: the state with the forms of tensors in place of the tensors, the same on all ranks.
        source: the state; ignored on other ranks than ``src``.
        src: the rank that has the state.
        sent: called on rank ``src`` when a buffer has been filled.
        fill: overwrites the tensors of forms with a key, which ``source`` does not have, given the optimizer that they
            are of, if any.
    """

    communicator: Communicator
    outline: Any
    source: Any
    src: int = 0
    sent: Sent = lambda: None
    fill: Callable[[Optimizer | None, Triples], object] | None = None

    def receive(self, into: Any = None, new: New = lambda path, form: form.empty(_CPU)) -> Any:
        """Return the state on every rank. Collective.

        Args:
            into: nested state of this rank. Its tensors are overwritten and returned, where they have the same form.
            new: makes the other tensors; by default on the CPU. ``needed`` leaves out some of them.
        """
        return self._receive(None, into, new)

    def load_into(self, optimizer: Optimizer) -> None:
        """Load the state into an optimizer, overwriting its own state in place. Collective.

        Args:
            optimizer: has groups like those of the state.
        """
        ranks, sharding = self.communicator, self.communicator.sharding
        # Optimizers number their parameters in order, as the state does.
        parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))

        def new(path: Keys, form: Form) -> Tensor:
            # The optimizer moves counts of steps itself, where it wants them on the device.
            parameter = parameters.get(path[1]) if len(path) > 2 and form.shape else None
            if parameter is None:
                return form.empty(_CPU)
            if sharding.owners.get(parameter, ranks.rank) != ranks.rank:
                return form.empty(_META)  # the optimizer drops it
            if len(path) == 3 and tuple(parameter.shape) == form.shape and sharding.is_sharded(parameter):
                return torch.empty_like(parameter.detach(), dtype=form.dtype)
            return form.empty(parameter.device)

        current = optimizer.state_dict()
        if sharding.of_parameters and not any(sharding.is_sharded(value) for _, value in leaves(current["state"])):
            current = {}  # from before its parameters were sharded: no memory to receive shards in
        optimizer.load_state_dict(self._receive(optimizer, current, new))

    def _receive(self, optimizer: Optimizer | None, into: Any, new: New) -> Any:
        ranks, present = self.communicator, dict(leaves(into))

        def target_of(path: Keys, form: Form) -> Tensor:
            value = present.get(path)
            if ranks.sharding.is_sharded(value) and form.describes(value):
                return value
            return value if form.fits(value) else new(path, form)

        targets = [(path, form, target_of(path, form)) for path, form in leaves(self.outline) if isinstance(form, Form)]
        if self.fill is not None:
            self.fill(optimizer, [target for target in targets if target[1].key is not None])
        sources = [value for _, value in leaves(self.source) if _is_dense(value)] if ranks.rank == self.src else []
        dense = [tensor for _, form, tensor in targets if form.key is None]
        broadcast_tensors(ranks, dense, sources, src=self.src, sent=self.sent)
        filled = (tensor for _, _, tensor in targets)
        return _mapped(self.outline, lambda value: next(filled) if isinstance(value, Form) else value)


def _is_dense(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor that its form describes. Others are sent with the outline."""
    if type(value) is not Tensor:
        return False
    return value.layout == torch.strided and not (value.is_quantized or value.requires_grad)


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return nested state with each value that is not a dict, list or tuple replaced by ``leaf(value)``."""
    if isinstance(value, dict):
        made = copy.copy(value)  # keeps the versions of modules, which are an attribute of their OrderedDict
        for key, item in value.items():
            made[key] = _mapped(item, leaf)  # a Counter's update() would count
        return made
    if isinstance(value, (list, tuple)):
        items = [_mapped(item, leaf) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return leaf(value)


def leaves(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the values that are not a dict, list or tuple, in the order of ``_mapped``, and where they are."""
    if not isinstance(value, (dict, list, tuple)):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(item, (*path, key))


# ------------------------------------------------------------------------------------------------------- buffers


@torch.no_grad()
def broadcast_tensors(
    communicator: Communicator,
    targets: Sequence[Tensor],
    sources: Iterable[Tensor],
    *,
    src: int = 0,
    sent: Sent = lambda: None,
) -> None:
    """Overwrite ``targets`` with rank ``src``'s ``sources``. Collective.

    Targets have the same shapes and dtypes on all ranks, are on any device, and dense or shards of dense ones. Sources,
    ignored on other ranks, may be the targets themselves, and be made as they are sent. ``sent`` is as in
    ``SentState``.
    """
    sends = communicator.rank == src
    # Views of targets and of their sources.
    views = (
        piece
        for target, source in zip(targets, sources if sends else targets, strict=True)
        for shard in _by_shard(communicator, target, source)
        for piece in _pieces(*shard)
    )
    for pieces in in_chunks(views, lambda piece: piece[0].nbytes, BUFFER_BYTES):
        sizes = [target.nbytes for target, _ in pieces]
        if sends:
            buffer = torch.cat(
                [as_bytes(source.to(communicator.device, target.dtype).contiguous()) for target, source in pieces]
            )
            sent()
        else:
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=communicator.device)
        communicator.collectives.broadcast(buffer, src)
        for (target, _), part in zip(pieces, torch.split(buffer, sizes), strict=True):
            # A copy, since the bytes of a tensor may begin where its dtype can't.
            target.copy_(part.clone().view(target.dtype).view(target.shape))


@torch.no_grad()
def copy_own(communicator: Communicator, target: Tensor, source: Tensor) -> None:
    """Overwrite this rank's part of ``target`` with its part of a whole tensor, of any dtype. Not collective."""
    if communicator.sharding.is_sharded(target):
        target, first = own_rows(communicator, target)
        source = source[first : first + len(target)]
    target.copy_(source)


def own_rows(communicator: Communicator, tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a sharded tensor, and the number of the first one."""
    start = 0
    for shard in communicator.sharding.shards_of(tensor):
        if not shard.is_meta:
            return shard, start
        start += len(shard)
    raise AssertionError("a rank without rows has a shard of 0 rows")


def _by_shard(communicator: Communicator, target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the shards of a target that are not empty, each with its source."""
    if source is target and not communicator.sharding.is_sharded(target):
        yield target, target
        return
    end = 0
    for shard in communicator.sharding.shards_of(target):
        start, end = end, end + len(shard) if shard.dim() else 0
        if shard.numel():
            yield shard, shard if source is target else source if shard is target else source[start:end]


def in_chunks(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield lists of successive items, each of at least one item.

    Args:
        items: any objects.
        size: returns the bytes of an item.
        most: the most bytes of a list, unless a single item is larger.
    """
    chunk: list[T] = []
    total = 0
    for item in items:
        if chunk and total + size(item) > most:
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size(item)
    if chunk:
        yield chunk


def _pieces(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of two tensors of one shape, each at most as large as a buffer."""
    if target.nbytes <= BUFFER_BYTES:
        yield target, source
    elif len(target) == 1:  # a single row, larger than a buffer
        yield from _pieces(target[0], source[0])
    else:
        rows = max(1, BUFFER_BYTES * len(target) // target.nbytes)
        for start in range(0, len(target), rows):
            yield from _pieces(target[start : start + rows], source[start : start + rows])
