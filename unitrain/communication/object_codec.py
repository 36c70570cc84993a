"""How objects are sent between ranks: as plain data if they are, else pickled, and signed with the key of the job.

To unpickle runs whatever the sender chose. So a pickle is opened only with the signature of a rank that has shown that
it knows the job's secret; in a job without a secret, none is made and none is opened.
"""

from __future__ import annotations

import hmac
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unitrain.communication import plain_data
from unitrain.errors import CommunicationError, UsageError

_PLAIN, _PICKLED = b"d", b"p"


class ObjectCodec:
    """Encodes and decodes the objects of one process. Without a key, ranks share no secret and send no pickles."""

    def __init__(self, rank: int, key: bytes | None) -> None:
        self._rank = rank
        self._key = key

    def encode(self, value: Any, exchange: int, *, pickles: bool) -> tuple[bytes, list[Tensor]]:
        """Return a header, and tensors that are sent after it.

        What is not plain data is pickled, or refused by a NotPlainError unless ``pickles``, or by a UsageError if the
        ranks share no secret. A signature is valid for one exchange, by its number, which is the same on all ranks.
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
        signature = _signature(self._key, self._rank, exchange, buffer.getbuffer())
        header, tensors = plain_data.encode([signature, torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)])
        return _PICKLED + header, tensors

    def decode(self, header: bytes, sender: int, exchange: int) -> tuple[Callable[[], Any], list[Tensor]]:
        """Return the tensors of an object, to be filled in, and a function that then returns the object.

        CommunicationError is raised if the header is invalid, or (by the function) if the pickle is not signed by the
        sender for this exchange.
        """
        try:
            value, tensors = plain_data.decode(header[1:])
        except ValueError as error:
            raise unreadable(sender, self._rank, str(error)) from error
        if header[:1] == _PLAIN:
            return lambda: value, tensors

        def load() -> Any:
            if not self._is_signed(value, sender, exchange):
                raise CommunicationError(
                    f"rank {sender} sent a pickled object to rank {self._rank} without the signature of this job: it "
                    "was not opened. Another program may have taken that rank's place (SECURITY.md)."
                )
            return pickle.loads(value[1].numpy().data)

        return load, tensors

    def _is_signed(self, value: Any, sender: int, exchange: int) -> bool:
        match value:
            case [bytes() as signature, Tensor() as data] if self._key is not None and data.dtype == torch.uint8:
                expected = _signature(self._key, sender, exchange, data.contiguous().numpy().data)
                return hmac.compare_digest(signature, expected)
        return False


def unreadable(sender: int, receiver: int, why: str) -> CommunicationError:
    """Return the error of a rank that has received what no rank of the job sends."""
    return CommunicationError(
        f"rank {receiver} could not read what rank {sender} sent ({why}). Check that all ranks run the same script "
        "with the same version of UniTrain, and that no other program reaches the ports of the job (SECURITY.md)."
    )


def _signature(key: bytes, sender: int, exchange: int, data: memoryview) -> bytes:
    signed = hmac.new(key, f"pickle {exchange} of rank {sender}:".encode(), "sha256")
    signed.update(data)
    return signed.digest()


class _Pickler(pickle.Pickler):
    """Pickles GPU tensors as CPU tensors: the sender's GPU may not exist, or not be free, on another rank."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented
