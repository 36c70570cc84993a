"""Warm worlds: ranks that run one function after another, for ``run_ranks``.

There is one world for each launcher, and for the simulated device under it, with as many processes as its largest job
so far. A new process takes 0.1 s of the processors' time, more until it has imported what its tests need, and another
function in an old one 0.03 s. Each function is given an environment with a store that nobody has used. What it may
change in its process is put back. Ranks that can't be put back (a thread or a process group was left, a function was
replaced, torch has compiled something) end with the function, and so does a world that fails or hangs; the next
function gets new ones.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import resource
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import fsspec
import numpy as np
import psutil
import torch
import torch.distributed as dist
from places import TESTS
from torch import nn

from unitrain.job.job import current
from unitrain.job.starting.spawn import collect, end, join, run_rank
from unitrain.launch import rendezvous

_FORKSERVER = multiprocessing.get_context("forkserver")
# Threads that may outlive a function, by the start of their names. fsspec keeps an event loop from the first use on.
_STAYING = ("unitrain exit watch", "fsspecIO", "asyncio_")
_worlds: dict[str, World] = {}


def run(
    key: str, environments: Sequence[Mapping[str, str]], fn: Callable[..., Any], args: tuple[Any, ...], timeout: float
) -> list[Any]:
    """Run ``fn(*args)`` on the ranks of a warm world, started if there is none, and return the results.

    Args:
        key: what is the same for all functions that may share a world: the launcher, a device.
        environments: the complete environment of each rank. RANKS_LOG is a file for its output.
        fn: a function at the top level of a module.
        args: its arguments.
        timeout: time limit in seconds.
    """
    packed = pickle.dumps((fn, args))
    world = _worlds.pop(key, None)
    if world is not None and not world.is_whole:
        world.close()
        world = None
    world = world or World()
    world.grow(len(environments))
    try:
        results = world.run(environments, packed, timeout)
        if world.is_warm:
            _worlds[key] = world
    finally:
        if key not in _worlds:
            world.close()
    return results


def pids() -> set[int]:
    """Return the processes that wait for functions."""
    return {process.pid for world in _worlds.values() for process in world.processes if process.pid is not None}


def close_all() -> None:
    """End all worlds."""
    while _worlds:
        _worlds.popitem()[1].close()


class World:
    """A number of processes that run functions as the ranks of one job after another, the first ones of a small job.

    Attributes:
        processes: the processes.
        is_warm: whether they can run another function.
    """

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.is_warm = True
        self._work: list[Connection] = []
        self._reports: list[Connection] = []

    def grow(self, nprocs: int) -> None:
        """Start processes until there are as many as this."""
        for _ in range(len(self.processes), nprocs):
            theirs, ours = _FORKSERVER.Pipe(duplex=False)
            receiver, sender = _FORKSERVER.Pipe(duplex=False)
            process = _FORKSERVER.Process(target=_serve, args=(theirs, sender))
            process.start()
            theirs.close()
            sender.close()
            self.processes.append(process)
            self._work.append(ours)
            self._reports.append(receiver)

    @property
    def is_whole(self) -> bool:
        """Whether no process has ended while it waited."""
        return all(process.is_alive() for process in self.processes)

    def run(self, environments: Sequence[Mapping[str, str]], packed: bytes, timeout: float) -> list[Any]:
        """Run a pickled function with its arguments; see the module's ``run``."""
        deadline = time.monotonic() + timeout
        self.is_warm = False
        count = len(environments)
        for work, environ in zip(self._work[:count], environments, strict=True):
            work.send((dict(environ), (sys.argv, sys.path, os.getcwd()), timeout, packed))
        results = collect(self.processes[:count], self._reports[:count], deadline)
        # A rank that has called sys.exit(0) has no result.
        self.is_warm = all(result is not None and not result[1] for result in results)
        if not self.is_warm:
            for work in self._work:
                with suppress(OSError):  # it has ended by itself
                    work.send(None)
            join(self.processes, deadline)
        return [None if result is None else result[0] for result in results]

    def close(self) -> None:
        """End the processes."""
        end(self.processes, 0.0)
        for connection in (*self._work, *self._reports):
            connection.close()


# ------------------------------------------------------------------------------------------------------- on a rank


def _serve(work: Connection, reports: Connection) -> None:
    """Run functions in this process until there are no more, or one has left what can't be put back."""
    weakref.finalize(work, int)  # registers an exit handler, with the first
    atexit._clear()  # what is there comes from the modules of the forkserver
    rank = _Rank()
    while rank.is_warm:
        order = work.recv()
        if order is None:
            return
        environ, place, timeout, packed = order
        run_rank(reports, environ, rank.call, (place, timeout, packed))


class _Rank:
    """This process, and what it was like before the first function."""

    def __init__(self) -> None:
        self.is_warm = True
        self._watched = _Watched()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._threads = torch.get_num_threads()
        self._hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._loggers = logging.root.level, logging.root.handlers[:]
        self._fixed = _fixed()

    def call(self, place: tuple[list[str], list[str], str], timeout: float, packed: bytes) -> tuple[Any, list[str]]:
        """Run a function, and return its result and why this process can run no other, if so."""
        sys.argv[:], sys.path[:], folder = place
        _send_output_to(os.environ.pop("RANKS_LOG"))
        os.chdir(folder)
        fn, args = pickle.loads(packed)
        self._watched.note()
        known = set(threading.enumerate())
        faulthandler.enable()
        faulthandler.dump_traceback_later(0.8 * timeout, file=sys.stderr)
        with warnings.catch_warnings():  # also forgets which warnings were shown
            result = fn(*args)
            atexit._run_exitfuncs()  # which close what a script did not
        faulthandler.cancel_dump_traceback_later()
        left = [*self._left(known), *self._watched.changed()]
        self.is_warm = not left
        if self.is_warm:
            self._put_back()
        return result, left

    def _left(self, known: set[threading.Thread]) -> Iterator[str]:
        """Yield what can't be put back."""
        gc.collect()
        job = current()
        if dist.is_initialized() or not (job is None or job.ended):
            yield "a process group"
        for thread in set(threading.enumerate()) - known:
            if not thread.name.startswith(_STAYING):
                thread.join(0.5)
                if thread.is_alive():
                    yield f"thread {thread.name}"
        if psutil.Process().children():
            yield "a process"
        if _fixed() != self._fixed:
            yield f"{_fixed()} instead of {self._fixed}"
        if torch._dynamo.utils.counters:
            yield "what torch has compiled"
        for name in ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_DYNAMIC_PROCESS_SETS"):
            # Beside a new process, which has another one, a rank would communicate otherwise, and gloo abort it.
            if name in os.environ:
                yield f"{name}, which Horovod keeps when it is initialised again"

    def _put_back(self) -> None:
        # A store has the address of one job.
        rendezvous._stores.clear()
        rendezvous._secrets.clear()
        rendezvous._calls = itertools.count()
        for filesystem in fsspec.registry.values():
            filesystem.clear_instance_cache()  # a test's server has ended with the test
        random.seed()
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        torch.set_num_threads(self._threads)
        sys.excepthook, threading.excepthook, sys.unraisablehook = self._hooks
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        logging.root.setLevel(self._loggers[0])
        logging.root.handlers[:] = self._loggers[1]
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False


def _send_output_to(log: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (for the rest of this process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


_BACKENDS: Any = torch.backends  # not all of which has types
_PRECISIONS = (_BACKENDS, _BACKENDS.cuda.matmul, _BACKENDS.cudnn, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn)


def _fixed() -> tuple[Any, ...]:
    """Return settings of this process that no function should leave changed."""
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        [getattr(one, "fp32_precision", None) for one in _PRECISIONS],
        torch.is_anomaly_enabled(),
        resource.getrlimit(resource.RLIMIT_AS),
        resource.getrlimit(resource.RLIMIT_NOFILE),
        resource.getrlimit(resource.RLIMIT_FSIZE),
        os.sched_getaffinity(0),
        socket.getdefaulttimeout(),
        gc.isenabled(),
        gc.get_threshold(),
    )


class _Watched:
    """The values in modules and classes that a function could replace."""

    _CONSTANT = (
        FunctionType,
        BuiltinFunctionType,
        type,
        int,
        float,
        str,
        bytes,
        tuple,
        property,
        staticmethod,
        classmethod,
    )
    _CHANGING = (list, dict, set)
    _OTHERS = (
        "builtins", "json", "os", "os.path", "pickle", "psutil", "random", "shutil", "signal", "socket", "subprocess",
        "tempfile", "threading", "time", "torch", "torch.cuda", "torch.distributed", "torch.nn.functional",
        "torch.distributed.distributed_c10d", "torch.optim", "torch.utils.data",
    )  # fmt: skip
    _CLASSES = (Path, nn.Module, nn.Parameter, socket.socket, threading.Thread, torch.Tensor, torch.optim.Optimizer)

    def __init__(self) -> None:
        self._seen: dict[ModuleType | type, dict[str, Any]] = {}
        self._tests = str(TESTS)

    def note(self) -> None:
        """Note the values of modules that were imported since the last time."""
        for name, module in list(sys.modules.items()):
            if module in self._seen or not self._watches(name, module):
                continue
            self._seen[module] = self._values(module)
            for one in vars(module).values():
                if issubclass(type(one), type) and one.__module__ == name:
                    self._seen[one] = self._values(one)
        for one in self._CLASSES:
            self._seen.setdefault(one, self._values(one))

    def _watches(self, name: str, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None) or ""
        return name.partition(".")[0] == "unitrain" or name in self._OTHERS or file.startswith(self._tests)

    def _values(self, owner: ModuleType | type) -> dict[str, Any]:
        return {
            name: len(value) if issubclass(type(value), self._CHANGING) else value
            for name, value in vars(owner).items()
            if issubclass(type(value), self._CONSTANT)  # isinstance makes some objects of torch warn
            or (issubclass(type(value), self._CHANGING) and isinstance(owner, ModuleType) and "test" in owner.__name__)
        }

    def changed(self) -> Iterator[str]:
        """Yield the names of values that are others than they were."""
        for owner, values in self._seen.items():
            now = vars(owner)
            for name, value in values.items():
                other = now.get(name)
                if getattr(other, "hooked", False):
                    continue  # torch wraps the method ``step`` of an optimizer's class when the first is made
                if other is not value and (len(other) if isinstance(other, self._CHANGING) else other) != value:
                    yield f"another {owner.__name__}.{name}"
