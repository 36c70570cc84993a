"""Values that the ranks exchange through horovodrun's key-value server, over HTTP."""

from __future__ import annotations

import http.client
import time
from contextlib import closing
from datetime import timedelta

from unitrain.errors import CommunicationError
from unitrain.launch.detect import Launch

# Of rank 0's addresses. Anybody who reaches the server can have written more.
_MOST_BYTES = 2**16
_OFFER = "/unitrain/store"
_HERE = "/unitrain/rank-{}"
_RETRY_S, _OFFER_RETRY_S = 0.1, 0.05


def share(offer: str | None, server: str, timeout: timedelta) -> str:
    """Return rank 0's offer on every rank. Blocks until rank 0 has made it.

    Args:
        offer: the address of rank 0's store, on rank 0; None on other ranks, which wait for it.
        server: host:port of the server.
        timeout: how long to wait for rank 0.

    Raises:
        CommunicationError: the server does not answer, or rank 0 has not come in time.
    """
    if offer is not None:
        _request(server, "PUT", _OFFER, offer)
        return offer
    deadline = time.monotonic() + timeout.total_seconds()
    while (answer := _request(server, "GET", _OFFER)) is None:
        if time.monotonic() > deadline:
            raise CommunicationError(
                f"rank 0 did not send its address to horovodrun's server ({server}) within "
                f"{timeout.total_seconds():g} s. Check that rank 0 is running."
            )
        time.sleep(_OFFER_RETRY_S)
    return answer


def await_all(launch: Launch, server: str, timeout_s: float) -> None:
    """Wait at the server of horovodrun's elastic driver until every rank has come there. Collective.

    Horovod's own rendezvous would abort the process if a rank never came, as on a host that can't start processes.

    Args:
        launch: how this process was started.
        server: host:port of the server.
        timeout_s: how long to wait, in seconds.

    Raises:
        CommunicationError: the server does not answer, or ranks have not come in time. It names them.
    """
    deadline = time.monotonic() + timeout_s
    # Only rank 0 asks for each of them.
    awaited = set(range(1, launch.world_size)) if launch.rank == 0 else {0}
    if launch.rank:
        _request(server, "PUT", _HERE.format(launch.rank), "here")
    # Ranks that have come are not asked for again.
    while awaited := {rank for rank in awaited if _request(server, "GET", _HERE.format(rank)) is None}:
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(awaited)))
            raise CommunicationError(
                f"rank {launch.rank} of {launch.world_size} waited {timeout_s:g} s for rank {ranks}, which horovodrun "
                "has not started: see above for what it says of its host."
            )
        time.sleep(_RETRY_S)
    if launch.rank == 0:
        _request(server, "PUT", _HERE.format(0), "here")


def _request(server: str, method: str, path: str, body: str | None = None) -> str | None:
    """Put or get a value of UniTrain's at horovodrun's server; return None if it is not set yet.

    Args:
        server: host:port of the server.
        method: PUT or GET.
        path: the key of the value.
        body: the value to put.
    """
    # A new connection each time: the server closes it after an answer.
    try:
        with closing(http.client.HTTPConnection(server, timeout=10)) as connection:
            connection.request(method, path, body)
            response = connection.getresponse()
            content = response.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise CommunicationError(
            f"horovodrun does not answer at {server}, the address in HOROVOD_GLOO_RENDEZVOUS_ADDR and "
            f"HOROVOD_GLOO_RENDEZVOUS_PORT ({error}). Check that it is still running. Start the job with "
            "horovodrun --gloo -np N python SCRIPT and leave its variables as they are."
        ) from error
    return content if response.status == http.client.OK else None
