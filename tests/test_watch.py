"""Which connections the watchdog's hub accepts."""

from __future__ import annotations

import json
import socket
import threading

from unitrain.job import watch
from unitrain.job.link import Link
from unitrain.job.messages import Hello


def test_strangers_are_not_let_in() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    welcomed: list[dict[int, Link] | None] = []
    hub = threading.Thread(target=lambda: welcomed.append(watch._accept_all(listener, "secret", 1, 30.0)))
    hub.start()
    hellos: list[object] = [
        {"kind": "hello", "token": "guessed", "rank": 0},
        {"kind": "hello", "token": "gëraten", "rank": 0},
        {"kind": "hello", "token": "\ud800", "rank": 0},
        {"kind": "hello", "rank": 0},
        {"token": "secret", "rank": 0},
        ["secret"],
    ]
    for hello in hellos:
        stranger = Link(socket.create_connection(address))
        stranger._connection.send_bytes(json.dumps(hello).encode())
        assert stranger.receive() is None, f"{hello} was answered"
        stranger.close()
    scanner = socket.create_connection(address)
    scanner.sendall(b"\x7f\xff\xff\xff")  # a message of 2 GiB
    assert scanner.recv(1) == b""
    scanner.close()
    member = Link(socket.create_connection(address))
    member.send(Hello("secret", 0))
    hub.join(30.0)
    (links,) = welcomed
    assert links is not None
    assert list(links) == [0]
    for link in (member, *links.values()):
        link.close()
