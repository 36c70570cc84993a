"""Fork processes for ``forked.py`` from one that has imported torch: ``fork_server.py DESCRIPTOR``.

Orders come through the listening socket with this descriptor, until stdin is closed.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    """Fork a process for each order, and tell its id and exit code. Returns only in these processes."""
    sys.modules["triton"] = None  # type: ignore[assignment]  # it complains of objects that are not freed
    for name in ("torch._dynamo", "unitrain.initialize", "unitrain.data"):
        import_module(name)
    gc.freeze()  # or each process would spend a second at its end on freeing what is imported here
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child stays as a zombie
    with socket.socket(fileno=int(sys.argv[1])) as server:
        while True:
            if 0 in select.select([server.fileno(), 0], [], [])[0]:
                os._exit(0)
            connection, _ = server.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    order = json.loads(connection.makefile().readline())
    script = os.fork()
    if script == 0:
        connection.close()
        become(order, dict(zip(order["streams"], descriptors, strict=True)))
        return
    for one in descriptors:
        os.close(one)
    connection.sendall(b"%d\n" % script)
    if connection.fileno() in select.select([connection.fileno(), os.pidfd_open(script)], [], [])[0]:  # it was closed
        os.kill(script, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
    with suppress(OSError):
        connection.sendall(b"%d\n" % code)
    os._exit(0)


def become(order: dict[str, Any], streams: dict[int, int]) -> None:
    """Give this process what the one that connects has: its arguments, environment, folder and standard streams."""
    os.setsid()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number in streams:
            os.dup2(streams[number], number)
            os.close(streams[number])
        else:
            os.close(number)
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv, sys.path[0] = order["command"], str(Path(order["command"][0]).parent)


main()
__file__ = sys.argv[0]
# Here, so that the process ends as one that was started with the script.
exec(compile(Path(__file__).read_text(), __file__, "exec"))
