"""How objects travel between ranks: as the bytes of plain data.

What is not plain data is pickled and signed with the key of the job. To unpickle runs whatever the sender chose. So a
pickle is opened only with the signature of a rank that has shown that it knows the job's secret; in a job without a
secret, none is made and none is opened.
"""

from __future__ import annotations

import hmac
import io
import pickle
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from unitrain.communication import plain_data
from unitrain.communication.collectives import Collectives
from unitrain.errors import CommunicationError, UsageError

T = TypeVar("T")


class _Pickled(NamedTuple):
    """A pickle, and the signature of its sender."""

    signature: bytes
    data: Tensor


plain_data.register(_Pickled, tuple, lambda fields: _Pickled(*fields))


class ObjectTransport:
    """Sends objects. The key, which signs pickles, is None if the ranks share no secret, or have not proved it yet."""

    def __init__(self, collectives: Collectives, key: bytes | None) -> None:
        self._collectives = collectives
        self._key = key
        self._exchanges = 0  # a signature is valid for one of them

    def broadcast(self, value: T, src: int, *, pickles: bool) -> T:
        """Return rank ``src``'s object. Collective. With ``pickles``, objects that are not plain data are pickled."""
        ranks = self._collectives
        if ranks.world_size == 1:
            return value
        self._exchanges += 1  # on each rank, so that they check a signature by the same number
        is_sender = ranks.rank == src
        data = self.encode(value, pickles=pickles) if is_sender else torch.empty(0, dtype=torch.uint8)
        size = int(ranks.broadcast(torch.tensor(data.numel(), device=ranks.device), src))
        data = data if is_sender else torch.empty(size, dtype=torch.uint8)
        received = ranks.broadcast(data.to(ranks.device, copy=True), src)
        return value if is_sender else cast(T, self.decode(received.cpu(), src))

    def all_gather(self, value: T, *, pickles: bool) -> list[T]:
        """Return the objects of all ranks, in rank order. Collective. ``pickles`` is as in ``broadcast``."""
        ranks = self._collectives
        if ranks.world_size == 1:
            return [value]
        self._exchanges += 1
        data = self.encode(value, pickles=pickles)
        sizes = ranks.all_gather(torch.tensor(data.numel(), device=ranks.device)).tolist()
        return [self.decode(part.cpu(), rank) for rank, part in enumerate(ranks.all_gather_padded(data, sizes))]

    def encode(self, value: Any, *, pickles: bool) -> Tensor:
        """Return the bytes that are sent for an object.

        Other than plain data is a NotPlainError unless ``pickles``, else a UsageError if the ranks share no secret.
        """
        try:
            return plain_data.encode(value)
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
        return plain_data.encode(_Pickled(self._signature(self._key, self._collectives.rank, pickled), pickled))

    def decode(self, data: Tensor, sender: int) -> Any:
        """Return the object that a rank has sent as ``data``.

        Invalid data, or a pickle without the sender's signature for this exchange, is a CommunicationError.
        """
        try:
            value = plain_data.decode(data)
        except ValueError as error:
            raise self._unreadable(sender, str(error)) from error
        return self._unpickled(value, sender) if isinstance(value, _Pickled) else value

    def _unpickled(self, value: _Pickled, sender: int) -> Any:
        match value:
            case (bytes() as signature, Tensor() as data) if self._key is not None and data.dtype == torch.uint8:
                if hmac.compare_digest(signature, self._signature(self._key, sender, data)):
                    return pickle.loads(data.numpy().data)
        raise CommunicationError(
            f"rank {sender} sent a pickled object to rank {self._collectives.rank} without the signature of this job: "
            "it was not opened. Another program may have taken that rank's place (SECURITY.md)."
        )

    def _signature(self, key: bytes, sender: int, data: Tensor) -> bytes:
        signed = hmac.new(key, f"pickle {self._exchanges} of rank {sender}:".encode(), "sha256")
        signed.update(data.contiguous().numpy().data)
        return signed.digest()

    def _unreadable(self, sender: int, why: str) -> CommunicationError:
        """Return the error of a rank that has received invalid data."""
        return CommunicationError(
            f"rank {self._collectives.rank} could not read what rank {sender} sent ({why}). Check that all ranks run "
            "the same script and UniTrain, and that no other program reaches the ports of the job (SECURITY.md)."
        )


class _Pickler(pickle.Pickler):
    """Pickles GPU tensors as CPU tensors: the sender's GPU may not exist, or not be free, on another rank."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented
