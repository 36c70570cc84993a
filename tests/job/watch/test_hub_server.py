"""The hub's thread with real connections: messages in pieces, ranks that stop reading, the limit of open files."""

from __future__ import annotations

import resource
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from unitrain.errors import LaunchError
from unitrain.job.watch import messages
from unitrain.job.watch.admission import introduce
from unitrain.job.watch.hub import Member, heartbeat_interval_s
from unitrain.job.watch.hub_server import HubServer
from unitrain.job.watch.link import Link
from unitrain.job.watch.messages import Message, encode
from unitrain.pulse import USER_CODE

KEY = b"k" * 32
RANKS = 3


class Job:
    """A hub in its thread, and a connection to it for each of three ranks."""

    def __init__(self) -> None:
        members = [Member(rank, "host", 1000 + rank, 0) for rank in range(RANKS)]
        self.thread = HubServer(members, KEY, timeout_s=60.0, heartbeat_timeout_s=1.0, one_host=True)
        self.thread.start()
        self.sockets = [introduce(["127.0.0.1"], self.thread.port, KEY, rank, 10.0) for rank in range(RANKS)]
        self.links = [Link(one.dup()) for one in self.sockets]
        assert [link.receive(10.0) for link in self.links] == [messages.HubHeartbeat()] * RANKS

    def next(self, rank: int) -> Message | None:
        """Return the next message to a rank that is no heartbeat."""
        while isinstance(message := self.links[rank].receive(10.0), messages.HubHeartbeat):
            pass
        return message

    def verdict(self, rank: int) -> str:
        message = self.next(rank)
        assert isinstance(message, messages.Verdict)
        return message.text

    def beat(self, *ranks: int) -> None:
        for rank in ranks:
            self.links[rank].send(messages.Heartbeat(USER_CODE, 1, 0.0))


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    for link, connection in zip(made.links, made.sockets, strict=True):
        link.close()
        connection.close()
    made.thread.join(10.0)
    assert not made.thread.is_alive(), "it ends when all connections have"


def test_all_leave(job: Job) -> None:
    for link in job.links:
        link.send(messages.Leave())
    assert [job.next(rank) for rank in range(RANKS)] == [messages.Leave()] * RANKS
    job.thread.join(10.0)
    assert not job.thread.is_alive()


def test_messages_in_pieces_and_several_at_once(job: Job) -> None:
    content = encode(messages.Ask())
    message = struct.pack("!i", len(content)) + content
    for at in range(len(message) - 1):
        job.sockets[1].sendall(message[at : at + 1])
        time.sleep(0.001)
    job.sockets[1].sendall(message[-1:] + message + message)
    assert [type(job.next(1)) for _ in range(3)] == [messages.Answer] * 3


@pytest.mark.parametrize(
    "sent", [struct.pack("!i", 2**20 + 1), struct.pack("!i", -1), struct.pack("!i", 5) + b"\xff\xfeabc"]
)
def test_a_rank_that_sends_garbage_is_the_verdict(job: Job, sent: bytes) -> None:
    job.beat(0, 2)
    job.sockets[1].sendall(sent)
    assert job.verdict(2).startswith("rank 1 on host (pid 1001) ended without reporting an error")


def test_a_silent_rank_is_the_verdict_after_heartbeat_timeout_s(job: Job) -> None:
    began = time.monotonic()
    for _ in range(20):
        job.beat(0, 1)
        time.sleep(0.1)
    assert job.verdict(0).startswith("rank 2 on host (pid 1002) sent no heartbeat for 1 s")
    assert time.monotonic() - began < 2 + 28


def test_a_rank_that_does_not_read_holds_up_nobody(job: Job) -> None:
    job.sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    question = encode(messages.Ask())
    flood = (struct.pack("!i", len(question)) + question) * 100_000
    job.sockets[1].settimeout(20.0)
    try:
        job.sockets[1].sendall(flood)  # 9 MB of answers, which it does not read
    except TimeoutError:
        pytest.fail("the hub stopped reading")
    for _ in range(20):  # while the answers pile up, and afterwards
        time.sleep(0.1)
        job.beat(0, 1, 2)
        job.links[2].send(messages.Ask())
        assert isinstance(job.next(2), messages.Answer)


def test_a_limit_of_open_files_that_is_too_low() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    members = [Member(rank, "host", rank, 0) for rank in range(hard)]
    with pytest.raises(
        LaunchError, match=rf"connections to all {hard} ranks, .* may open only {hard} files: .*ulimit -Hn"
    ):
        HubServer(members, KEY, timeout_s=1.0, heartbeat_timeout_s=1.0, one_host=True)


@pytest.mark.parametrize(
    ("timeout_s", "ranks", "interval_s"),
    [(30.0, 2, 1.0), (30.0, 125, 1.0), (30.0, 1000, 8.0), (30.0, 10_000, 10.0), (2.0, 2, 0.4), (3.0, 10_000, 1.0)],
)
def test_heartbeats_of_larger_jobs_are_rarer(timeout_s: float, ranks: int, interval_s: float) -> None:
    """Several fit into the time after which a rank counts as stalled."""
    assert heartbeat_interval_s(timeout_s, ranks) == interval_s
