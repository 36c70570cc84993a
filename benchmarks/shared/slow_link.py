"""Two network namespaces with a slow link between them, in which a benchmark runs one process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unitrain.launch.local.launchers import launch_environment
from unitrain.launch.local.toolchain import find_program

_ADDRESSES = ("192.0.2.1", "192.0.2.2")  # reserved for documentation, so that no host has them
DEVICE = "wire"  # the name of the link's interface on each side
_PORT = "29500"  # free, since each namespace has its own ports
# Arguments of tc, on each side of the link.
LINKS = {
    "100 Mbit/s": ["tbf", "rate", "100mbit", "burst", "256kb", "latency", "100ms"],
    "1 Gbit/s": ["tbf", "rate", "1gbit", "burst", "1mb", "latency", "100ms"],
}


class SlowLink:
    """Two namespaces with a link between them. Made by ``slow_link``."""

    def __init__(self, namespaces: Sequence[str]) -> None:
        self._namespaces = namespaces

    def in_both(self, part: Callable[..., Any], *, deadline: float = 900, **arguments: Any) -> Any:
        """Call ``part`` as rank 0 and rank 1, one on each side, and return the result that is not None.

        Args:
            part: a function of the running script, as for ``in_processes``.
            deadline: time limit in seconds.
            **arguments: arguments of the part, serialisable to JSON.

        Raises:
            RuntimeError: a process failed; the message has the output of both.
            subprocess.TimeoutExpired: they did not end in time.
        """
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "result.json")
            script = str(Path(part.__code__.co_filename).resolve())
            called = [sys.executable, script, "--part", part.__name__, json.dumps(arguments), str(result)]
            processes, logs = [], []
            try:
                for rank, namespace in enumerate(self._namespaces):
                    logs.append(Path(folder, f"rank {rank}"))
                    with logs[-1].open("wb") as log:
                        processes.append(
                            subprocess.Popen(
                                ["ip", "netns", "exec", namespace, *called],
                                env={**launch_environment(), **_environment(rank)},
                                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                            )
                        )  # fmt: skip
                codes = [process.wait(deadline) for process in processes]
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            if any(codes) or not result.exists():
                printed = "\n".join(log.read_text(errors="replace") for log in logs)
                raise RuntimeError(f"{part.__name__} exited with codes {codes}:\n{printed}")
            return json.loads(result.read_text())


def _environment(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank),
        "MASTER_ADDR": _ADDRESSES[0], "MASTER_PORT": _PORT, "GLOO_SOCKET_IFNAME": DEVICE,
    }  # fmt: skip


def lacking() -> str | None:
    """Return why network namespaces can't be used here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if find_program("ip") is None or find_program("tc") is None:
        return "ip and tc are not found: install iproute2"
    return None


@contextmanager
def slow_link(kind: str) -> Iterator[SlowLink]:
    """Create two namespaces with a link of ``LINKS`` between them, and delete them afterwards.

    Raises:
        OSError: the kernel does not support it.
    """
    mark = uuid.uuid4().hex[:8]
    namespaces = [f"bench-{mark}-{rank}" for rank in range(2)]
    made: list[str] = []
    try:
        for namespace in namespaces:
            _ip("netns", "add", namespace)
            made.append(namespace)
        peer = ["type", "veth", "peer", "name", DEVICE, "netns", namespaces[1]]
        _ip("link", "add", "name", DEVICE, "netns", namespaces[0], *peer)
        for namespace, address in zip(namespaces, _ADDRESSES, strict=True):
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", namespace, "link", "set", device, "up")
            _run("tc", "-n", namespace, "qdisc", "add", "dev", DEVICE, "root", *LINKS[kind])
        yield SlowLink(namespaces)
    finally:
        for namespace in made:
            _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"`{' '.join(command)}`: {done.stderr.strip()}")
