"""Asking horovodrun's elastic driver for the next rank. Its driver itself: faults/test_horovodrun_elastic.py."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from unitrain.features.horovod_elastic import asking
from unitrain.features.horovod_elastic.asking import VARIABLES, next_place


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
