"""The process that forks for ``asking.py``: it has imported torch, which takes each new process 3.4 s otherwise."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import multiprocessing
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

_PRELOADED = (
    "torch._dynamo", "torch.distributed.run", "unitrain.initialize", "unitrain.data",
    # What recipes and pages import, which took each of their processes 2 to 4 s.
    "matplotlib.figure", "sklearn.datasets", "sklearn.metrics", "torch.utils.tensorboard",
    "torchvision", "yaml",
)  # fmt: skip


def main(descriptor: int) -> NoReturn:
    """Fork a process for each connection to the socket with this descriptor, until stdin ends."""
    _end_as_python_does(serve(descriptor))


def serve(descriptor: int) -> CodeType:
    """Return the program of a fork, in the fork."""
    gc.disable()
    for name in _PRELOADED:
        import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    forks: dict[socket.socket, int] = {}  # by the connections to those who wait for them
    with socket.socket(fileno=descriptor) as server, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    for fork in forks.values():
                        os.kill(fork, signal.SIGKILL)
                    os._exit(0)
                elif key.fileobj is server:
                    connection, _ = server.accept()
                    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
                    order = json.loads(connection.makefile().readline())
                    fork = os.fork()
                    if fork == 0:
                        for other in (connection, *forks):
                            other.close()
                        for entry in list(selector.get_map().values()):
                            if isinstance(entry.fileobj, int):
                                os.close(entry.fileobj)
                        return _become(order, streams)
                    for stream in streams:
                        os.close(stream)
                    forks[connection] = fork
                    selector.register(connection, selectors.EVENT_READ)
                    selector.register(os.pidfd_open(fork), selectors.EVENT_READ, connection)
                    connection.sendall(f"{fork}\n".encode())
                elif key.data is None:  # the one who waits has been killed
                    selector.unregister(key.fileobj)
                    with suppress(ProcessLookupError):
                        os.kill(forks[key.fileobj], signal.SIGKILL)  # type: ignore[index]
                else:  # a fork has ended
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    with suppress(KeyError):
                        selector.unregister(key.data)
                    code = os.waitstatus_to_exitcode(os.waitpid(forks.pop(key.data), 0)[1])
                    with suppress(OSError):
                        key.data.sendall(f"{code}\n".encode())
                    key.data.close()


def _become(order: dict[str, Any], streams: list[int]) -> CodeType:
    """Give this process what a new one would have been given, and return what it runs."""
    given = dict(zip(order["streams"], streams, strict=True))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number in given:
            os.dup2(given[number], number)
            os.close(given[number])
        else:
            os.close(number)
            setattr(sys, name, None)
    for output in filter(None, (sys.stdout, sys.stderr)):
        output.reconfigure(line_buffering=output.isatty(), write_through=order["unbuffered"])
    if order["shows_faults"]:
        faulthandler.enable()
    os.setsid()
    os.chdir(order["folder"])
    multiprocessing.process.ORIGINAL_DIR = order["folder"]  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(order["environ"])
    for limit, values in order["limits"]:
        resource.setrlimit(limit, tuple(values))
    os.sched_setaffinity(0, order["processors"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in order["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    if "PYTHONPATH" in os.environ:
        sys.path[1:1] = os.environ["PYTHONPATH"].split(os.pathsep)
    if filters := os.environ.get("PYTHONWARNINGS"):
        warnings._processoptions(filters.split(","))  # type: ignore[attr-defined]
    if "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.executable, sys.orig_argv = order["orig_argv"][0], order["orig_argv"]
    return _program(order["program"])


def _program(words: list[str]) -> CodeType:
    kind, *rest = words
    if kind == "-m":
        name, *arguments = rest
        sys.argv, sys.path[0] = ["-m", *arguments], os.getcwd()
        return compile(f"import runpy; runpy._run_module_as_main({name!r})", "<string>", "exec")
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        return compile(rest[0], "<string>", "exec", dont_inherit=True)
    sys.argv, sys.path[0] = words, str(Path(kind).resolve().parent)
    vars(sys.modules["__main__"])["__file__"] = kind
    return compile(Path(kind).read_bytes(), kind, "exec", dont_inherit=True)


def _end_as_python_does(code: CodeType) -> NoReturn:
    """Run a program in ``__main__`` and end the process, but without freeing every module, which takes 0.3 s."""
    status: Any = None
    try:
        exec(code, vars(sys.modules["__main__"]))
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    for output in filter(None, (sys.stdout, sys.stderr)):
        output.flush()
    if status is not None and status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit((status or 0) & 0xFF)
