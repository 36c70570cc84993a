"""Hosts of horovodrun that change: the run stops once there is a checkpoint, and asks the driver for its next rank."""

from __future__ import annotations

import atexit
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from places import TESTS
from pretended import PretendedRank, pretended_rank

import unitrain
from unitrain import ConfigError
from unitrain.features.horovod_elastic import asking
from unitrain.features.horovod_elastic.asking import VARIABLES, next_place
from unitrain.features.horovod_elastic.hosts import ChangedHosts


def answering(answer: bytes, after_s: float = 0.0) -> str:
    """Return the address of a server that answers one request so."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server, server.accept()[0] as connection:
            assert connection.recv(1000).startswith(b"GET /rank_and_size/node1:3 HTTP")
            time.sleep(after_s)
            connection.sendall(b"HTTP/1.0 %b\r\nContent-Length: %d\r\n\r\n%b" % (b"200 OK", len(answer), answer))

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_the_answer() -> None:
    place = next_place(answering(b"5,8,1,4,1,2"), "node1", "3")
    assert place == dict(zip([f"HOROVOD_{name}" for name in VARIABLES], "581412", strict=True))
    assert next_place(answering(b"-1,-1,-1,-1,-1,-1"), "node1", "3") is None
    with pytest.raises(ConnectionError, match="gave no new rank at"):
        next_place(answering(b"5,8"), "node1", "3")


def test_a_long_wait_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(asking, "_PATIENCE_S", 0.1)
    assert next_place(answering(b"0,1,0,1,0,1", after_s=0.3), "node1", "3")
    said = capsys.readouterr().err
    assert said.startswith("unitrain: node1, local rank 3: horovodrun has given no new rank for 0.1 s.")
    assert said.count("\n") == 1


def test_a_driver_that_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="Connection refused"):
        next_place(address, "node1", "3")
    assert time.monotonic() - began < 30


def watched(monkeypatch: pytest.MonkeyPatch, *, elastic: bool) -> tuple[PretendedRank, ChangedHosts, list[Any]]:
    """Return a rank, the feature in it, and the functions that are to be called when hosts change."""
    rank, calls = pretended_rank(), list[Callable[[], None]]()
    backend = rank.sockets.backend
    backend.launch = replace(backend.launch, elastic=elastic)
    monkeypatch.setattr(type(backend), "watch_hosts", lambda self, changed: calls.append(changed))
    hosts = ChangedHosts()
    # At the end of the tests, it would run pytest again in place of this process.
    monkeypatch.setattr(atexit, "register", lambda function: None)
    hosts.plug_in(rank.sockets)
    return rank, hosts, calls


def test_hosts_that_change_early_are_gone_on_with_once_there_is_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, hosts, [changed] = watched(monkeypatch, elastic=True)
    stopping = rank.sockets.stopping
    changed()
    stopping.pass_boundary()
    hosts.at_boundary()
    assert not hosts.goes_on
    saves = Mock(**{"save_now.return_value": "here"})
    stopping.listen(saves)
    try:
        hosts.at_boundary()
        with pytest.raises(unitrain.Stopped):
            stopping.pass_boundary()
    finally:
        stopping.close()
    assert hosts.goes_on
    saves.wait.assert_not_called()


def test_hosts_are_watched_under_an_elastic_launcher_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, hosts, calls = watched(monkeypatch, elastic=False)
    assert calls == []
    assert hosts not in rank.sockets.hooks


def test_only_a_backend_that_can_goes_on_with_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere, horovodrun would wait for the others as long as they wait for the one that failed."""
    recorded = TESTS / "launch_environments" / "horovodrun-gloo.json"
    for name, value in {**json.loads(recorded.read_text())["environments"][0], "HOROVOD_ELASTIC": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="backend 'ddp' can't go on with other hosts"):
        unitrain.init(backend="ddp")
