"""Sends a host's files in memory to the next host, in the background, so that they outlive the loss of one host."""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from unitrain.checkpoint.store.store import FOLDER
from unitrain.communication.communicator import Communicator
from unitrain.job.watch.admission import admit_ranks, introduce
from unitrain.job.watch.hub_server import listen
from unitrain.launch.network.addresses import own_addresses

from .memory_store import MemoryStore

_BLOCK = 2**22


class Neighbour:
    """Sends files to the next host, on the first rank of each, and keeps the files of the previous host. Collective.

    Each end shows the other that it has the job's ``key``, as to the hub. What is sent has digests, and is not secret.
    """

    def __init__(self, ranks: Communicator, store: MemoryStore, key: bytes, timeout_s: float) -> None:
        self._store = store
        self._key = hmac.digest(key, b"copies in memory", "sha256")
        self._timeout_s = timeout_s
        self._sending: Connection | None = None
        place: tuple[list[str], int] = ([], 0)
        if store.leads:
            listener = listen(one_host=False, backlog=1)  # only the previous host connects
            place = own_addresses(), listener.getsockname()[1]
            threading.Thread(target=self._keep, args=(listener,), name="unitrain neighbour", daemon=True).start()
        places = ranks.all_gather_data(place)
        leaders = sorted(set(store.leader))
        following = leaders[(leaders.index(store.leader[ranks.rank]) + 1) % len(leaders)]
        self._addresses, self._port = places[following]

    def send(self, names: Sequence[str]) -> None:
        """Send files of this host's folder, and return when they are kept. Raises CommunicationError and OSError."""
        if self._sending is None:
            self._sending = _connected(introduce(self._addresses, self._port, self._key, 0, self._timeout_s))
        for name in names:
            with open(self._store.disk.root / name, "rb") as file:
                self._sending.send_bytes(json.dumps([name, self._store.disk.size(name)]).encode())
                while block := file.read(_BLOCK):
                    self._sending.send_bytes(block)
        self._sending.send_bytes(b"[]")
        try:
            self._sending.recv_bytes(1)
        except EOFError as error:
            raise ConnectionError("the next host did not keep this host's part") from error

    def _keep(self, listener: Any) -> None:
        """Keep the files that the previous host sends, until it ends."""
        connection = None
        try:
            [admitted] = asyncio.run(admit_ranks(listener, self._key, 1, self._timeout_s)).values()
            connection = _connected(admitted)
            while True:
                said = json.loads(connection.recv_bytes(_BLOCK))
                if said:
                    self._keep_file(connection, *said)
                else:
                    connection.send_bytes(b"1")
        except (OSError, EOFError, ValueError, TypeError):
            pass  # the host before says so, if it is left
        finally:
            if connection is not None:
                connection.close()

    def _keep_file(self, connection: Connection, name: str, size: int) -> None:
        disk, (folder, file) = self._store.disk, name.split("/")
        # Names come from another host: none may lead out of the folder.
        if not FOLDER.fullmatch(folder) or file in ("", ".", "..") or Path(file).name != file:
            raise ValueError(name)
        self._store.make()
        disk.make(folder)
        with disk.draft(name) as draft, open(draft, "wb") as written:
            while written.tell() < size:
                written.write(connection.recv_bytes(_BLOCK))


def _connected(connection: Any) -> Connection:
    connection.setblocking(True)  # the handshake leaves it with a time limit, or for asyncio
    return Connection(connection.detach())
