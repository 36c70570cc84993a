"""Two hosts on this machine: network namespaces with a wire between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_V6_AT_ONCE = ("net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0")


@contextmanager
def joined_hosts(first: str, second: str) -> Iterator[tuple[str, str]]:
    """Make two namespaces with these addresses and no others, and yield their names for ``ip netns exec``."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2 (apt-get install iproute2)")
    names = (f"unitrain-{os.getpid()}-0", f"unitrain-{os.getpid()}-1")
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
            subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", *_V6_AT_ONCE], check=True)
        wire = ["eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1]]
        subprocess.run(["ip", "link", "add", *wire], check=True)
        for name, address in zip(names, (first, second), strict=True):
            subprocess.run(["ip", "-n", name, "addr", "add", address, "dev", "eth0"], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "eth0", "up"], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two hosts at 10.99.0.1 and 10.99.0.2."""
    with joined_hosts("10.99.0.1/24", "10.99.0.2/24") as hosts:
        yield hosts
