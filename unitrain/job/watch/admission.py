"""Admission to the hub: which connections come from the ranks of the job, shown by challenge and response.

The hub sends a challenge. A rank answers with its number, another challenge, and an HMAC over all of that under
the job's key, and the hub answers with its own HMAC. Nothing else is read before: no length, no text, no JSON. The key
is never sent.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import time
from collections.abc import Sequence

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


async def admit_ranks(
    listener: socket.socket, key: bytes, world_size: int, timeout_s: float
) -> dict[int, socket.socket]:
    """Return a connection to every rank, which does not block; none if not all have connected in time.

    The listener is closed in the end. Runs in the hub's thread.

    Args:
        listener: a listening socket, which the ranks connect to.
        key: the job's key, which a rank must prove to have.
        world_size: the number of ranks, rank 0 included.
        timeout_s: how long to wait for all of them, in seconds.
    """
    admitted: dict[int, socket.socket] = {}
    ended, turn = asyncio.Event(), asyncio.Lock()

    async def admit() -> None:
        """Meet one newcomer after another."""
        while not ended.is_set():
            async with turn:
                newcomer = await _accept(listener)
            rank = world_size
            try:
                rank = await asyncio.wait_for(_rank_of(newcomer, key), _ANSWER_S)
            except (OSError, asyncio.TimeoutError):
                pass
            finally:
                # The first connection of a rank counts. A second one would be a rank that was started twice.
                if rank < world_size and rank not in admitted:
                    admitted[rank] = newcomer
                else:
                    newcomer.close()
            if len(admitted) == world_size:
                ended.set()

    listener.setblocking(False)
    # So many newcomers may be answering. The others wait in the listener's backlog.
    admitting = [asyncio.create_task(admit()) for _ in range(_MOST_NEWCOMERS)]
    try:
        await asyncio.wait_for(ended.wait(), timeout_s)
    except asyncio.TimeoutError:
        for connection in admitted.values():
            connection.close()
        return {}
    finally:
        ended.set()
        for task in admitting:  # strangers may still be answering
            task.cancel()
        await asyncio.gather(*admitting, return_exceptions=True)
        listener.close()
    return admitted


async def _accept(listener: socket.socket) -> socket.socket:
    """Return the next connection."""
    while True:
        try:
            newcomer, _ = await asyncio.get_running_loop().sock_accept(listener)
        except OSError:  # it has ended already, or this process may open no more files
            await asyncio.sleep(_RETRY_S)
        else:
            close_in_children(newcomer)
            return newcomer


async def _rank_of(newcomer: socket.socket, key: bytes) -> int:
    """Challenge a connection, and return its rank, a number that may be out of range.

    Raises:
        OSError: the connection has ended, or its answer is wrong.
    """
    loop = asyncio.get_running_loop()
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    await loop.sock_sendall(newcomer, challenge)
    answer = b""
    while len(answer) < _ANSWER_BYTES:
        part = await loop.sock_recv(newcomer, _ANSWER_BYTES - len(answer))
        if not part:
            raise ConnectionError
        answer += part
    claim, proof = answer[:_CLAIM_BYTES], answer[_CLAIM_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"rank", challenge, claim)):
        raise ConnectionError
    await loop.sock_sendall(newcomer, _proof(key, b"hub", challenge, claim))
    return int.from_bytes(claim[:_RANK_BYTES], "big")


def introduce(addresses: Sequence[str], port: int, key: bytes, rank: int, timeout_s: float) -> socket.socket:
    """Return a connection to the hub at rank 0's host, after each end has shown the other that it has the job's key.

    Blocks for up to ``timeout_s``, in the main thread of every rank.

    Args:
        addresses: the addresses of rank 0's host, tried in this order.
        port: the port that the hub listens at.
        key: the job's key.
        rank: this process's rank.
        timeout_s: how long to try, in seconds.

    Raises:
        CommunicationError: the hub can't be reached, does not answer, or does not have the key.
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
        # The hub must prove itself, too: its messages end processes.
        if not hmac.compare_digest(proof, _proof(key, b"hub", challenge, claim)):
            connection.close()
            raise CommunicationError(
                f"rank {rank}: the program that listens at {', '.join(addresses)}, port {port}, is not rank 0 of this "
                "job. Start the job again, and see SECURITY.md."
            )
        connection.settimeout(None)
        return connection


def _receive(connection: socket.socket, size: int) -> bytes:
    """Return exactly ``size`` bytes; OSError is raised if the connection ends or times out before."""
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("the connection was closed")
        received += part
    return received


def _proof(key: bytes, end: bytes, challenge: bytes, claim: bytes) -> bytes:
    """Return the HMAC by which one end proves that it has the key. The ends differ, so that none can echo the other."""
    return hmac.digest(key, end + challenge + claim, "sha256")
