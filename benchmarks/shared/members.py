"""The ranks of a job as its hub sees them: connections from a process of their own, which send heartbeats."""

from __future__ import annotations

import multiprocessing
import resource
import secrets
import selectors
import socket
import time
from multiprocessing.connection import Connection

from unitrain.job import messages
from unitrain.job.admission import introduce
from unitrain.job.hub import Member, heartbeat_interval_s
from unitrain.job.hub_server import start_hub
from unitrain.job.link import LENGTH
from unitrain.job.messages import Message, encode
from unitrain.pulse import USER_CODE

HEARTBEAT_TIMEOUT_S = 30.0
_START_S = 120.0
_OTHER_FILES = 512


def can_have(ranks: int) -> bool:
    """Return whether a process may open a connection for each of so many ranks."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return hard == resource.RLIM_INFINITY or hard >= ranks + _OTHER_FILES


def hub_share(ranks: int, seconds: float) -> float:
    """Return the share of a core that the hub of a job of so many ranks takes."""
    key = secrets.token_bytes(32)
    members = [Member(rank, f"host{rank // 8}", rank, 0) for rank in range(ranks)]
    port, hub = start_hub(members, key, timeout_s=_START_S, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, one_host=True)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_be_ranks, args=(port, key, ranks, theirs))
    process.start()
    assert ours.recv() == "welcome"
    time.sleep(heartbeat_interval_s(HEARTBEAT_TIMEOUT_S, ranks))
    clock = time.pthread_getcpuclockid(int(hub.ident or 0))
    begin, used = time.perf_counter(), time.clock_gettime(clock)
    time.sleep(seconds)
    share = (time.clock_gettime(clock) - used) / (time.perf_counter() - begin)
    assert hub.is_alive(), "the job has ended"
    ours.send("leave")
    process.join()
    hub.join()
    return share


def _be_ranks(port: int, key: bytes, ranks: int, parent: Connection) -> None:
    """Send each rank's heartbeats, evenly over the time, and read what the hub sends."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connections = [introduce(["127.0.0.1"], port, key, rank, _START_S) for rank in range(ranks)]
    for connection in connections:
        connection.recv(2**16)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    heartbeat = _framed(messages.Heartbeat(USER_CODE, 1000, 0.1))
    interval_s = heartbeat_interval_s(HEARTBEAT_TIMEOUT_S, ranks)
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        parent.send("welcome")
        begin, sent = time.perf_counter(), 0
        while not parent.poll():
            due = int((time.perf_counter() - begin) / interval_s * ranks)
            for number in range(sent, due):
                connections[number % ranks].sendall(heartbeat)
            sent = due
            for entry, _ in selector.select(0.001):
                assert isinstance(entry.fileobj, socket.socket)
                entry.fileobj.recv(2**16)
    for connection in connections:
        connection.sendall(_framed(messages.Leave()))
    for connection in connections:
        while connection.recv(2**16):
            pass
        connection.close()


def _framed(message: Message) -> bytes:
    content = encode(message)
    return LENGTH.pack(len(content)) + content
