"""How objects travel between ranks: a header of bytes, and the tensors in them after it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from unitrain.communication.object_codec import ObjectCodec, unreadable
from unitrain.communication.plain_data import chunks

if TYPE_CHECKING:
    from unitrain.communication.communicator import Communicator

T = TypeVar("T")
_LENGTH = struct.Struct("!q")
_MOST_BYTES = 2**40  # of an object


class ObjectTransport:
    """Sends objects. The key, which signs pickles, is None if the ranks share no secret, or have not proved it yet."""

    def __init__(self, communicator: Communicator, key: bytes | None) -> None:
        self._communicator = communicator
        self._codec = ObjectCodec(communicator.rank, key)
        self._exchanges = 0

    def broadcast(self, value: T, src: int, *, pickles: bool) -> T:
        """Return rank ``src``'s object. Collective. With ``pickles``, what is not plain data is pickled."""
        ranks = self._communicator
        if ranks.world_size == 1:
            return value
        self._exchanges += 1
        is_sender = ranks.rank == src
        header, tensors = self._codec.encode(value, self._exchanges, pickles=pickles) if is_sender else (b"", [])
        size = int(ranks.broadcast(torch.tensor(len(header)), src))
        if not 0 < size <= _MOST_BYTES:
            raise unreadable(src, ranks.rank, f"{size} bytes")
        received = ranks.broadcast(_from_bytes(header) if is_sender else torch.empty(size, dtype=torch.uint8), src)
        if is_sender:
            for chunk in chunks(tensors):
                ranks.broadcast(torch.cat(chunk), src)
            return value
        result, tensors = self._codec.decode(_to_bytes(received), src, self._exchanges)
        for chunk in chunks(tensors):  # on a GPU, each passes through its memory
            _fill(chunk, ranks.broadcast(torch.cat(chunk), src))
        return cast(T, result())

    def all_gather(self, value: T, *, pickles: bool) -> list[T]:
        """Return the objects of all ranks, in rank order. Collective. ``pickles`` is as in ``broadcast``."""
        ranks = self._communicator
        if ranks.world_size == 1:
            return [value]
        self._exchanges += 1
        header, tensors = self._codec.encode(value, self._exchanges, pickles=pickles)
        data = torch.cat([_from_bytes(_LENGTH.pack(len(header)) + header), *map(as_bytes, tensors)])
        sizes = ranks.all_gather_alike(torch.tensor(data.numel(), device=ranks.device)).tolist()
        for rank, size in enumerate(sizes):
            if not _LENGTH.size < size <= _MOST_BYTES:
                raise unreadable(rank, ranks.rank, f"{size} bytes")
        parts = ranks.all_gather_padded(data, sizes)
        return [self._unpacked(part.cpu(), rank) for rank, part in enumerate(parts)]

    def _unpacked(self, data: Tensor, sender: int) -> Any:
        """Return the object in what a rank has sent: the length of a header, the header, and tensors."""
        [length] = _LENGTH.unpack(_to_bytes(data[: _LENGTH.size]))
        header, content = data[_LENGTH.size :][:length], data[_LENGTH.size :][length:]
        result, tensors = self._codec.decode(_to_bytes(header), sender, self._exchanges)
        parts = [as_bytes(tensor) for tensor in tensors]
        if sum(part.numel() for part in parts) != content.numel():
            raise unreadable(sender, self._communicator.rank, f"{content.numel()} bytes of tensors")
        _fill(parts, content)
        return result()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of a tensor's bytes, so that a backend need not support its dtype to move it."""
    return tensor.reshape(-1).view(torch.uint8)


def _from_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def _fill(parts: Sequence[Tensor], content: Tensor) -> None:
    """Fill flat tensors of bytes from ``content``, one after another."""
    for part, its in zip(parts, torch.split(content, [part.numel() for part in parts]), strict=True):
        part.copy_(its)
