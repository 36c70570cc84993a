"""Pickles are opened only with the signature of the rank, and of the exchange, that they were made for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from unitrain.communication.collectives import Collectives
from unitrain.communication.objects import ObjectTransport
from unitrain.communication.plain_data import NotPlainError
from unitrain.errors import CommunicationError, UsageError

KEY = b"k" * 32


class Thing:
    """No plain data."""


def transport(rank: int, key: bytes | None, exchange: int = 5) -> ObjectTransport:
    """Return what sends a rank's objects, in one exchange."""
    made = ObjectTransport(cast(Collectives, SimpleNamespace(rank=rank)), key)
    made._exchanges = exchange
    return made


def test_a_signed_pickle_is_opened_once() -> None:
    assert isinstance(transport(0, KEY).decode(transport(1, KEY).encode(Thing(), pickles=True), 1), Thing)


@pytest.mark.parametrize(
    ("key", "sender", "exchange"), [(KEY, 1, 6), (KEY, 2, 5), (b"other" * 7, 1, 5), (None, 1, 5)],
    ids=["replayed", "of another rank", "of another job", "in a job without a secret"],
)  # fmt: skip
def test_other_pickles_are_not(key: bytes | None, sender: int, exchange: int) -> None:
    data = transport(1, KEY).encode(Thing(), pickles=True)
    with pytest.raises(CommunicationError, match=f"rank {sender} sent a pickled object .* without the signature"):
        transport(0, key, exchange).decode(data, sender)


def test_without_a_key_none_is_made() -> None:
    with pytest.raises(
        UsageError, match=r"Thing is not plain data, so .*export UNITRAIN_JOB_SECRET=\$\(openssl rand -hex 32\)"
    ):
        transport(0, None).encode([Thing()], pickles=True)
    with pytest.raises(NotPlainError):
        transport(0, KEY).encode([Thing()], pickles=False)


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b'{"_Pickled":1}', b'{"_Pickled":[]}', b'{"_Pickled":[{"bytes":""},{"tensor":["float32",[1]]}]}'],
)
def test_what_no_rank_sends(header: bytes) -> None:
    data = torch.frombuffer(bytearray(len(header).to_bytes(8, "big") + header + bytes(4 * header.count(b"tensor"))),
                            dtype=torch.uint8)  # fmt: skip
    with pytest.raises(CommunicationError, match=r"rank 3 sent|what rank 3 sent \(.*SECURITY\.md"):
        transport(0, KEY).decode(data, 3)
