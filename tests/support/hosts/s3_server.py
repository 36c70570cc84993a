"""A real S3 server on this machine, moto's, in a process of its own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from free_ports import free_port

_STARTS_S = 60


class S3Server:
    """A server that keeps its objects in memory, with an empty bucket ``bucket``.

    Attributes:
        environ: variables that lead botocore, which is behind s3fs, to the server.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environ = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        }
        program = shutil.which("moto_server", path=str(Path(sys.executable).parent)) or "moto_server"
        self._process = subprocess.Popen(
            [program, "-H", "127.0.0.1", "-p", str(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + _STARTS_S
        while True:
            try:
                self.request("PUT", "/bucket")
                return
            except OSError:
                if time.monotonic() > end or self._process.poll() is not None:
                    self.kill()
                    raise
                time.sleep(0.05)

    def request(self, method: str, path: str, data: bytes = b"") -> bytes:
        """Make a request, and return the body of the response."""
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "text/plain"}, method=method)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return bytes(reply.read())

    def pause(self) -> None:
        """Have it answer no request until ``go_on`` is called."""
        self._process.send_signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """A server for the tests of a module."""
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture
def s3_url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL of a folder that does not exist yet."""
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # connected to the server of another module
    return f"s3://bucket/{uuid4().hex}"
