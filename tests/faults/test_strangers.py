"""Programs that do not belong to a job connect to every port that it opens, from the start to the end."""

from __future__ import annotations

import pickle
import socket
import subprocess
import time
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import forked_python
import psutil
import pytest
from harness import FORKED, MPIRUN, MPIRUN_DDP, PLAIN, TORCHRUN, World, run, worlds

pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("faults")]
_MOST_SILENT = 50


class _Harm:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


class _Strangers:
    """Send pickles, garbage, and nothing to a job's ports."""

    def __init__(self, file: Path) -> None:
        pickled = pickle.dumps(_Harm(file))
        framed = len(pickled).to_bytes(4, "big") + pickled
        hello = '{"kind":"hello","token":"gërate","rank":1}'.encode()
        self._sent = cycle(
            [pickled, framed, len(hello).to_bytes(4, "big") + hello, b"\x7f\xff\xff\xff", b"\xff" * 4096]
        )
        self._silent: list[socket.socket] = []
        self.addresses: set[str] = set()
        self.attempts = 0

    def attack(self, process: subprocess.Popen[bytes]) -> None:
        """Go on until the job has ended."""
        while process.poll() is None:
            for port in self._ports(process):
                with suppress(OSError):
                    self._connect(port)
            time.sleep(0.02)
        for connection in self._silent:
            connection.close()

    def _ports(self, process: subprocess.Popen[bytes]) -> set[int]:
        ports = set()
        with suppress(psutil.Error):
            for one in [*psutil.Process(process.pid).children(recursive=True), *forked_python.running()]:
                with suppress(psutil.Error):
                    for connection in one.net_connections("tcp"):
                        if connection.status == psutil.CONN_LISTEN:
                            self.addresses.add(connection.laddr.ip)
                            ports.add(connection.laddr.port)
        return ports

    def _connect(self, port: int) -> None:
        connection = socket.create_connection(("127.0.0.1", port), 0.2)
        self.attempts += 1
        if self.attempts % 3 == 0 and len(self._silent) < _MOST_SILENT:
            self._silent.append(connection)
            return
        with connection:
            connection.settimeout(0.2)
            connection.sendall(next(self._sent))


# Not horovodrun: Horovod's gloo aborts the process as soon as a stranger connects to it.
@worlds(FORKED, soak=[PLAIN, TORCHRUN, MPIRUN, MPIRUN_DDP])
def test_strangers_at_every_port(world: World, tmp_path: Path) -> None:
    """No code of theirs runs, and the job goes on. Rank 1 comes later, while they are at the store."""
    harm = tmp_path / "harm"
    strangers = _Strangers(harm)
    end = run(world, tmp_path, steps=20, fault="none:1:init", pause=0.05, meanwhile=strangers.attack)
    assert not harm.exists()
    assert strangers.attempts > 20, end.job.output
    assert end.job.code == 0, end.job.output
    if world in (FORKED, PLAIN):
        assert strangers.addresses == {"127.0.0.1"}, "all ranks are on this host"
