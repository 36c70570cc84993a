"""Admission to the hub: which connections come from the ranks of the job, shown by challenge and response.

The hub sends a challenge. A rank answers with its number, another challenge, and an HMAC over all of that under
the job's key, and the hub answers with its own HMAC. Nothing else is read before: no length, no text, no JSON. The key
is never sent.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from itertools import takewhile

from unitrain.errors import CommunicationError
from unitrain.job.watch.link import close_in_children
from unitrain.launch.network.addresses import reach

_CHALLENGE_BYTES = _PROOF_BYTES = 32
_RANK_BYTES = 4
_CLAIM_BYTES = _RANK_BYTES + _CHALLENGE_BYTES
_ANSWER_BYTES = _CLAIM_BYTES + _PROOF_BYTES
# How long a connection may take to answer, and how many may be about to: strangers are to use up neither the file
# descriptors of rank 0 nor its time.
_ANSWER_S = 2.0
_MOST_NEWCOMERS = 128
_RETRY_S = 0.1
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _RefusedError(Exception):
    """A connection does not come from a rank of this job."""


class _Newcomer:
    """A connection that has not answered its challenge yet."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        self._connection = connection
        self._challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        self._answer = b""
        self.refused_at = now + _ANSWER_S
        connection.send(self._challenge)

    def read(self, key: bytes) -> int | None:
        """Read what has arrived, and return the rank once all of its answer has.

        Raises:
            _RefusedError: the answer is wrong.
            OSError: the connection has ended.
        """
        received = self._connection.recv(_ANSWER_BYTES - len(self._answer))
        if not received:
            raise _RefusedError
        self._answer += received
        if len(self._answer) < _ANSWER_BYTES:
            return None
        claim, proof = self._answer[:_CLAIM_BYTES], self._answer[_CLAIM_BYTES:]
        if not hmac.compare_digest(proof, _proof(key, b"rank", self._challenge, claim)):
            raise _RefusedError
        self._connection.send(_proof(key, b"hub", self._challenge, claim))
        return int.from_bytes(claim[:_RANK_BYTES], "big")


def admit_ranks(
    listener: socket.socket, key: bytes, world_size: int, timeout_s: float
) -> dict[int, socket.socket] | None:
    """Return a connection to every rank, which does not block; None if not all have connected in time.

    The listener is closed in the end.
    """
    deadline = time.monotonic() + timeout_s
    admission = _Admission(listener, key, world_size)
    try:
        while len(admission.admitted) < world_size:
            if time.monotonic() > deadline:
                for connection in admission.admitted.values():
                    connection.close()
                return None
            admission.proceed(deadline)
    finally:
        admission.close()
    return admission.admitted


class _Admission:
    """The connections that a hub accepts until every rank has one."""

    def __init__(self, listener: socket.socket, key: bytes, world_size: int) -> None:
        self._listener = listener
        self._key = key
        self._world_size = world_size
        self._newcomers: dict[socket.socket, _Newcomer] = {}  # in the order in which their time is up
        self._selector = selectors.DefaultSelector()
        self._accepts = False
        self.admitted: dict[int, socket.socket] = {}
        listener.setblocking(False)

    def proceed(self, deadline: float) -> None:
        """Wait for something to happen, at most until ``deadline``, and process it."""
        self._accept_while(len(self._newcomers) < _MOST_NEWCOMERS)
        next_refusal = next((newcomer.refused_at for newcomer in self._newcomers.values()), deadline)
        ready = self._selector.select(max(0.0, min(next_refusal, deadline) - time.monotonic()))
        now = time.monotonic()
        for connection in [entry.fileobj for entry, _ in ready]:
            assert isinstance(connection, socket.socket)
            if connection is self._listener:
                self._accept(now)
            else:
                self._read(connection)
        for connection in list(takewhile(lambda one: self._newcomers[one].refused_at < now, self._newcomers)):
            self._refuse(connection)

    def _accept_while(self, has_room: bool) -> None:
        """Accept connections only while there is room: the others wait in the listener's backlog."""
        if has_room and not self._accepts:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._accepts and not has_room:
            self._selector.unregister(self._listener)
        self._accepts = has_room

    def _accept(self, now: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _OUT_OF_FILES:
                time.sleep(_RETRY_S)
            return  # otherwise it has ended already
        close_in_children(connection)
        connection.setblocking(False)
        try:
            self._newcomers[connection] = _Newcomer(connection, now)
        except OSError:
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            rank = self._newcomers[connection].read(self._key)
        except (OSError, _RefusedError):
            self._refuse(connection)
            return
        if rank is None:
            return
        if rank >= self._world_size or rank in self.admitted:
            self._refuse(connection)
            return
        self._selector.unregister(connection)
        del self._newcomers[connection]
        self.admitted[rank] = connection

    def _refuse(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._newcomers[connection]
        connection.close()

    def close(self) -> None:
        """Close the listener, and all connections that have not been admitted."""
        for connection in list(self._newcomers):
            self._refuse(connection)
        self._selector.close()
        self._listener.close()


def introduce(addresses: Sequence[str], port: int, key: bytes, rank: int, timeout_s: float) -> socket.socket:
    """Return a connection to the hub at rank 0's host, after each end has shown the other that it has the job's key.

    Raises:
        CommunicationError: the hub can't be reached, or did not answer within ``timeout_s``, or has another key.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        connection = reach(addresses, port)
        try:
            connection.settimeout(max(_RETRY_S, deadline - time.monotonic()))
            challenge = _receive(connection, _CHALLENGE_BYTES)
            claim = rank.to_bytes(_RANK_BYTES, "big") + secrets.token_bytes(_CHALLENGE_BYTES)
            connection.sendall(claim + _proof(key, b"rank", challenge, claim))
            proof = _receive(connection, _PROOF_BYTES)
        except OSError as error:
            connection.close()
            if time.monotonic() < deadline:  # this process was too slow, on a busy host say
                time.sleep(_RETRY_S)
                continue
            raise CommunicationError(
                f"rank {rank} connected to rank 0 at {', '.join(addresses)}, port {port}, but was not admitted within "
                f"{timeout_s:g} s ({error}). Check that no other program fills that port with connections."
            ) from error
        if not hmac.compare_digest(proof, _proof(key, b"hub", challenge, claim)):
            connection.close()
            raise CommunicationError(
                f"rank {rank}: the program that listens at {', '.join(addresses)}, port {port}, is not rank 0 of this "
                "job. Start the job again, and see SECURITY.md."
            )
        connection.settimeout(None)
        return connection


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("the connection was closed")
        received += part
    return received


def _proof(key: bytes, end: bytes, challenge: bytes, claim: bytes) -> bytes:
    """Return what only a holder of the key can answer. The two ends answer differently, so none can echo the other."""
    return hmac.digest(key, end + challenge + claim, "sha256")
