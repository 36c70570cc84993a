"""Who is admitted by the hub that watches a job's processes, and what strangers can do to it."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest

from unitrain.errors import CommunicationError
from unitrain.job.watch import admission
from unitrain.job.watch.admission import admit_ranks, introduce

KEY = b"k" * 32
Admitted = dict[int, socket.socket]


class Door:
    """A hub that admits so many ranks, in a thread."""

    def __init__(self, world_size: int, timeout_s: float = 30.0) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._pool = ThreadPoolExecutor(1)
        admitting = admit_ranks(listener, KEY, world_size, timeout_s)
        self.admitted: Future[Admitted] = self._pool.submit(asyncio.run, admitting)

    def knock(self) -> socket.socket:
        """Return the connection of a stranger."""
        return socket.create_connection(("127.0.0.1", self.port), 10.0)

    def introduce(self, rank: int, key: bytes = KEY, timeout_s: float = 10.0) -> socket.socket:
        return introduce(["127.0.0.1"], self.port, key, rank, timeout_s)

    def close(self, *connections: socket.socket) -> None:
        for connection in (*connections, *self.admitted.result(30.0).values()):
            connection.close()
        self._pool.shutdown()


@pytest.fixture
def door() -> Iterator[Door]:
    """The hub of a job of one rank, which that rank has reached in the end, whatever has happened before."""
    opened = Door(1)
    yield opened
    member = opened.introduce(0)
    assert list(opened.admitted.result(30.0)) == [0]
    opened.close(member)


@pytest.mark.parametrize(
    "sent",
    [
        b'{"kind":"hello","token":"gu\xc3\xa9ss","rank":0}' + b" " * 30,
        b'{"kind":"hello","token":"\\ud800","rank":0}' + b" " * 30,
        b"\x7f\xff\xff\xff" + b"\x00" * 64,  # a message of 2 GiB, for a hub that would read a length
        b"GET / HTTP/1.1\r\nHost: somewhere.far.away.example\r\nAccept: everything\r\n\r\n",
        b"\x80\x04\x95" + b"c" * 65,  # the beginning of a pickle
        random.Random(0).randbytes(68),
        bytes(10**6),
    ],
    ids=["non-ASCII", "surrogate", "length", "HTTP", "pickle", "random", "zeros"],
)
def test_garbage_is_refused(door: Door, sent: bytes) -> None:
    with door.knock() as stranger:
        assert len(stranger.recv(32)) == 32, "each connection gets a challenge"
        with suppress(ConnectionResetError, BrokenPipeError):  # closed with some of it unread
            stranger.sendall(sent)
            assert stranger.recv(1) == b"", "it was answered"


def test_a_connection_that_breaks_off(door: Door) -> None:
    for sent in (b"", b"\x00" * 5):
        with door.knock() as stranger:
            stranger.sendall(sent)


def test_a_wrong_key(door: Door) -> None:
    with pytest.raises(CommunicationError, match=r"rank 0 connected .* but was not admitted within 0.3 s"):
        door.introduce(0, key=b"guessed" * 5, timeout_s=0.3)


def test_an_answer_that_was_overheard(door: Door) -> None:
    """Another connection's answer is not accepted: each gets a challenge of its own."""
    with door.knock() as stranger:
        challenge = stranger.recv(32)
        claim = bytes(4) + os.urandom(32)
        answer = claim + admission._proof(KEY, b"rank", os.urandom(32), claim)
        assert challenge
        stranger.sendall(answer)
        assert stranger.recv(1) == b""


def test_a_hub_that_does_not_know_the_key() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def pose_as_hub() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(os.urandom(32))
            connection.recv(68, socket.MSG_WAITALL)
            connection.sendall(os.urandom(32))

    poser = threading.Thread(target=pose_as_hub)
    poser.start()
    with listener, pytest.raises(CommunicationError, match="is not rank 0 of this job"):
        introduce(["127.0.0.1"], listener.getsockname()[1], KEY, 1, 10.0)
    poser.join()


def test_a_rank_that_is_taken_or_does_not_exist() -> None:
    door = Door(2)
    first = door.introduce(0)
    for rank in (0, 2, 2**32 - 1):
        with door.knock() as double:  # with the key
            claim = rank.to_bytes(4, "big") + os.urandom(32)
            double.sendall(claim + admission._proof(KEY, b"rank", double.recv(32), claim))
            double.recv(32)
            assert double.recv(1) == b""
    second = door.introduce(1)
    assert sorted(door.admitted.result(30.0)) == [0, 1]
    door.close(first, second)


def test_silent_strangers_use_up_neither_descriptors_nor_time() -> None:
    """More of them than are let in at once: each is refused after its time, and the rank still gets in."""
    door = Door(1)
    before = len(os.listdir("/proc/self/fd"))
    strangers = [door.knock() for _ in range(2 * admission._MOST_NEWCOMERS)]
    time.sleep(0.3)
    at_the_hub = len(os.listdir("/proc/self/fd")) - before - len(strangers)
    began = time.monotonic()
    member = door.introduce(0, timeout_s=20.0)
    took = time.monotonic() - began
    door.close(member, *strangers)
    assert admission._MOST_NEWCOMERS / 2 < at_the_hub <= admission._MOST_NEWCOMERS + 4, "and an event loop"
    assert took < 4 * admission._ANSWER_S


def test_slow_strangers_are_refused_after_their_time(door: Door) -> None:
    """One byte after another does not win more time."""
    with door.knock() as stranger:
        stranger.recv(32)
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012
            while time.monotonic() - began < 3 * admission._ANSWER_S:
                stranger.sendall(b"\x00")
                time.sleep(0.1)
        assert time.monotonic() - began >= admission._ANSWER_S / 2


def test_ranks_that_do_not_come() -> None:
    door = Door(2, timeout_s=0.2)
    first = door.introduce(0)
    assert door.admitted.result(30.0) == {}
    assert first.recv(1) == b"", "the one that came is told"
    door.close(first)
