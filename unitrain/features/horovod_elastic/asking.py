"""Asks horovodrun's elastic driver for this process's next rank, and then runs a rank's command again in its place.

Run as a script, with the command as its arguments. It imports neither UniTrain nor torch: it may wait for minutes.
"""

from __future__ import annotations

import http.client
import os
import select
import socket
import sys
import time

# In the order of the driver's answer.
VARIABLES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_NO_PLACE = -1
# A host may be off the network for a moment.
_REACH_S, _ATTEMPT_S, _RETRY_S = 60.0, 10.0, 1.0
_PATIENCE_S = 60.0
_PROBE_S, _PROBES = 10, 3
_WAITS = (
    "unitrain: {host}, local rank {local_rank}: horovodrun has given no new rank for {seconds:g} s. It waits until "
    "each process of the job has asked for one, or has ended. If a host was cut off, that is when ssh gives up: set "
    "ServerAliveInterval 5 in ~/.ssh/config where horovodrun runs."
)


def next_place(server: str, host: str, local_rank: str) -> dict[str, str] | None:
    """Return the variables of the next rank, once every process of the job has asked for its own, or has ended.

    Blocks until then, which may take minutes. The variables are None if the job continues without this process.

    Args:
        server: host:port of the server of horovodrun's elastic driver.
        host: the name of this process's host as horovodrun knows it.
        local_rank: the rank among the processes of the host, which stays the same.

    Raises:
        ConnectionError: the driver has gone, or its answer makes no sense.
    """
    connection = _connected(server)
    try:
        connection.request("GET", f"/rank_and_size/{host}:{local_rank}")
        if not select.select([connection.sock], [], [], _PATIENCE_S)[0]:
            print(_WAITS.format(host=host, local_rank=local_rank, seconds=_PATIENCE_S), file=sys.stderr, flush=True)
        response = connection.getresponse()
        numbers = [int(number) for number in response.read().split(b",")]
        if response.status != http.client.OK or len(numbers) != len(VARIABLES):
            raise ValueError(f"it answered {response.status}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _no_rank(server, error) from error
    finally:
        connection.close()
    if numbers[0] == _NO_PLACE:
        return None
    # As horovodrun sets them when it starts a process.
    return {f"HOROVOD_{name}": str(number) for name, number in zip(VARIABLES, numbers, strict=True)}


def _connected(server: str) -> http.client.HTTPConnection:
    """Return a connection to the driver's server, which may be out of reach for a while, but not closed.

    Tries for ``_REACH_S``, unless the connection is refused: then the driver has ended.
    """
    deadline = time.monotonic() + _REACH_S
    while True:
        connection = http.client.HTTPConnection(server, timeout=_ATTEMPT_S)
        try:
            connection.connect()
            break
        except OSError as error:
            connection.close()
            # A refused connection means that the host is reached, but the driver has ended.
            if isinstance(error, ConnectionRefusedError) or time.monotonic() > deadline:
                raise _no_rank(server, error) from error
            time.sleep(_RETRY_S)
    # The answer may take long, so TCP finds out whether the server's host is still there.
    connection.sock.settimeout(None)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    return connection


def _no_rank(server: str, error: Exception) -> ConnectionError:
    """Return the error that the driver has given no rank, with its cause."""
    return ConnectionError(f"horovodrun gave no new rank at {server}: {error or type(error).__name__}")


def main(command: list[str]) -> None:
    """Run the command in place of this process, with the variables of its next rank."""
    host, local_rank = os.environ["HOROVOD_HOSTNAME"], os.environ["HOROVOD_LOCAL_RANK"]
    server = f"{os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
    try:
        place = next_place(server, host, local_rank)
    except ConnectionError as error:
        sys.exit(f"unitrain: {host}, local rank {local_rank}: {error}.")
    if place is None:
        print(f"unitrain: {host}, local rank {local_rank}: the job goes on without it.", file=sys.stderr)
        return  # with 0: the driver takes anything else for a failure of the host
    os.execvpe(command[0], command, {**os.environ, **place})


if __name__ == "__main__":
    main(sys.argv[1:])
