"""How objects travel between ranks: a header of bytes, and the tensors in them after it.

What is not plain data is pickled and signed with the key of the job. To unpickle runs whatever the sender chose. So a
pickle is opened only with the signature of a rank that has shown that it knows the job's secret; in a job without a
secret, none is made and none is opened.
"""

from __future__ import annotations

import hmac
import io
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from unitrain.communication import plain_data
from unitrain.errors import CommunicationError, UsageError

if TYPE_CHECKING:
    from unitrain.communication.communicator import Communicator

T = TypeVar("T")
_LENGTH = struct.Struct("!q")
_MOST_BYTES = 2**40  # of an object
_PLAIN, _PICKLED = b"d", b"p"


class ObjectTransport:
    """Sends objects. The key, which signs pickles, is None if the ranks share no secret, or have not proved it yet."""

    def __init__(self, communicator: Communicator, key: bytes | None) -> None:
        self._communicator = communicator
        self._key = key
        self._exchanges = 0  # a signature is valid for one of them

    def broadcast(self, value: T, src: int, *, pickles: bool) -> T:
        """Return rank ``src``'s object. Collective. With ``pickles``, what is not plain data is pickled."""
        ranks = self._communicator
        if ranks.world_size == 1:
            return value
        self._exchanges += 1
        is_sender = ranks.rank == src
        header, tensors = self.encode(value, pickles=pickles) if is_sender else (b"", [])
        size = int(ranks.broadcast(torch.tensor(len(header)), src))
        if not 0 < size <= _MOST_BYTES:
            raise self._unreadable(src, f"{size} bytes")
        received = ranks.broadcast(_from_bytes(header) if is_sender else torch.empty(size, dtype=torch.uint8), src)
        if is_sender:
            for chunk in plain_data.chunks(tensors):
                ranks.broadcast(torch.cat(chunk), src)
            return value
        result, tensors = self.decode(_to_bytes(received), src)
        for chunk in plain_data.chunks(tensors):  # on a GPU, each passes through its memory
            _fill(chunk, ranks.broadcast(torch.cat(chunk), src))
        return cast(T, result())

    def all_gather(self, value: T, *, pickles: bool) -> list[T]:
        """Return the objects of all ranks, in rank order. Collective. ``pickles`` is as in ``broadcast``."""
        ranks = self._communicator
        if ranks.world_size == 1:
            return [value]
        self._exchanges += 1
        header, tensors = self.encode(value, pickles=pickles)
        data = torch.cat([_from_bytes(_LENGTH.pack(len(header)) + header), *map(as_bytes, tensors)])
        sizes = ranks.all_gather_alike(torch.tensor(data.numel(), device=ranks.device)).tolist()
        for rank, size in enumerate(sizes):
            if not _LENGTH.size < size <= _MOST_BYTES:
                raise self._unreadable(rank, f"{size} bytes")
        parts = ranks.all_gather_padded(data, sizes)
        return [self._unpacked(part.cpu(), rank) for rank, part in enumerate(parts)]

    def _unpacked(self, data: Tensor, sender: int) -> Any:
        """Return the object in what a rank has sent: the length of a header, the header, and tensors."""
        [length] = _LENGTH.unpack(_to_bytes(data[: _LENGTH.size]))
        header, content = data[_LENGTH.size :][:length], data[_LENGTH.size :][length:]
        result, tensors = self.decode(_to_bytes(header), sender)
        parts = [as_bytes(tensor) for tensor in tensors]
        if sum(part.numel() for part in parts) != content.numel():
            raise self._unreadable(sender, f"{content.numel()} bytes of tensors")
        _fill(parts, content)
        return result()

    def encode(self, value: Any, *, pickles: bool) -> tuple[bytes, list[Tensor]]:
        """Return a header, and tensors that are sent after it.

        NotPlainError is raised for other than plain data unless ``pickles``, else UsageError if the ranks share no
        secret.
        """
        try:
            header, tensors = plain_data.encode(value)
            return _PLAIN + header, tensors
        except plain_data.NotPlainError as error:
            if not pickles:
                raise
            if self._key is None:
                raise UsageError(
                    f"{error}, so it must be pickled. A pickle can run code, and is sent only between ranks that share "
                    "a secret, which these ranks don't. Send plain data (None, bools, ints, floats, strings, bytes, "
                    "tensors, and lists, tuples and dicts of these), or set UNITRAIN_JOB_SECRET to the same random "
                    "string on every host (export UNITRAIN_JOB_SECRET=$(openssl rand -hex 32))."
                ) from error
        buffer = io.BytesIO()
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        pickled = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        header, tensors = plain_data.encode([self._signature(self._key, self._communicator.rank, pickled), pickled])
        return _PICKLED + header, tensors

    def decode(self, header: bytes, sender: int) -> tuple[Callable[[], Any], list[Tensor]]:
        """Return a function that returns the object, once the tensors that are returned with it have been filled in.

        CommunicationError is raised if the header is invalid, or (by the function) if the pickle is not signed by the
        sender for this exchange.
        """
        try:
            value, tensors = plain_data.decode(header[1:])
        except ValueError as error:
            raise self._unreadable(sender, str(error)) from error
        return lambda: value if header[:1] == _PLAIN else self._unpickled(value, sender), tensors

    def _unpickled(self, value: Any, sender: int) -> Any:
        match value:
            case [bytes() as signature, Tensor() as data] if self._key is not None and data.dtype == torch.uint8:
                if hmac.compare_digest(signature, self._signature(self._key, sender, data)):
                    return pickle.loads(data.numpy().data)
        raise CommunicationError(
            f"rank {sender} sent a pickled object to rank {self._communicator.rank} without the signature of this job: "
            "it was not opened. Another program may have taken that rank's place (SECURITY.md)."
        )

    def _signature(self, key: bytes, sender: int, data: Tensor) -> bytes:
        signed = hmac.new(key, f"pickle {self._exchanges} of rank {sender}:".encode(), "sha256")
        signed.update(data.contiguous().numpy().data)
        return signed.digest()

    def _unreadable(self, sender: int, why: str) -> CommunicationError:
        """Return the error of a rank that has received what no rank of the job sends."""
        return CommunicationError(
            f"rank {self._communicator.rank} could not read what rank {sender} sent ({why}). Check that all ranks run "
            "the same script with the same version of UniTrain, and that no other program reaches the ports of the job "
            "(SECURITY.md)."
        )


class _Pickler(pickle.Pickler):
    """Pickles GPU tensors as CPU tensors: the sender's GPU may not exist, or not be free, on another rank."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented


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
