"""Fixtures and hooks for all tests: GPUs are hidden from tests without the mark ``gpu``, and tests must clean up.

How workers share the tests is in ``sharing.py``.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any
from weakref import WeakSet

# On few cores, threads and ranks that spin while they wait hold up those for which they wait: it took twice the time.
# OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")

import descendants
import forked_python
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import warm
from hypothesis import HealthCheck, settings

from unitrain import Strategy, initialize
from unitrain.features.memory_copies.memory_store import folder_of

pytest_plugins = ["pytester", "cpu_seconds", "s3_server", "saved_run", "sharing", "slurm", "harness"]

# How long an example takes depends on what else this machine does. The rest is Hypothesis's own choice, here or in CI.
for _profile, _examples in (("unitrain", 25), ("soak", 400)):
    settings.register_profile(
        _profile, settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=_examples
    )
settings.load_profile("unitrain")

_LEAVE_S = 5.0
_FAILED = pytest.StashKey[bool]()
# What continuous integration has; a skip for want of one of these hides a failure to install it.
_REQUIRED = re.compile(r"\b(horovod\w*|mpi|mpirun|mpi4py|gloo|compiler)\b", re.IGNORECASE)
# The reasons of blocks of the pages, which other tests run, may name anything.
_OF_PAGES = "Skipped: a block of the documentation:"


# -------------------------------------------------------------------------------------------------- what is seen


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, so that results are the same on every machine. ``-m gpu`` runs the tests that need one."""
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch looks at it when it first uses CUDA
    # nohup has SIGHUP ignored, and the shell of a script SIGINT in the background. What tests start would inherit that,
    # but no handler. Workers do as the process that started them.
    deaf_to = getattr(config, "workerinput", {}).get("deaf_to", [])
    for number in (signal.SIGHUP, signal.SIGINT):
        if number in deaf_to or signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, _do_nothing)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist which signals were ignored for this process."""
    node.workerinput["deaf_to"] = [
        int(number) for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) is _do_nothing
    ]


def _do_nothing(*_: object) -> None:
    """Handle a signal."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Leave modules and collected tests, which stay, out of garbage collections, each of which would take 0.3 s."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


# ------------------------------------------------------------------------------------------------ nothing is left


def _processes() -> set[tuple[int, int]]:
    """Return the running descendants of this process, except those that tests share, by pid and start."""
    kept = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    kept |= warm.pids() | forked_python.pids()
    return {
        (process.pid, process.started)
        for process in descendants.descendants()
        if process.pid not in kept and process.state != "Z"
    }


def _left_processes(new: set[tuple[int, int]]) -> list[str]:
    deadline = time.monotonic() + _LEAVE_S
    while (left := new & _processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    said = []
    for pid, _ in left:
        try:
            process = psutil.Process(pid)
            if process.name() == "addr2line":
                continue  # torch's: it reads the stacks in snapshots of a GPU's memory until this process ends
            said.append(f"process {process.pid} ({' '.join(process.cmdline())[:200]})")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return said


def _left_threads(before: set[threading.Thread]) -> list[str]:
    # fsspec keeps an event loop, which keeps its threads, from the first use on.
    left = {t for t in set(threading.enumerate()) - before if not t.name.startswith(("fsspecIO", "asyncio_"))}
    for thread in left:
        thread.join(_LEAVE_S)
    return [f"thread {thread.name}" for thread in left if thread.is_alive()]


def _left_group() -> list[str]:
    if not dist.is_initialized():
        return []
    dist.destroy_process_group()
    return ["a process group of torch.distributed"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Record whether a test fails."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close a test's strategies, and fail the test if it leaves a process, a thread or a process group."""
    opened: WeakSet[Strategy] = WeakSet()

    def opening(*arguments: Any) -> Strategy:
        strategy = Strategy(*arguments)
        opened.add(strategy)
        return strategy

    monkeypatch.setattr(initialize, "Strategy", opening)
    processes, threads = _processes(), set(threading.enumerate())
    yield
    for strategy in list(opened):
        strategy.close()  # also after a failure, which would otherwise make every later test fail
    if request.node.stash.get(_FAILED, False):
        return  # its traceback keeps objects alive
    new = _processes() - processes
    if new or set(threading.enumerate()) - threads:
        gc.collect()  # an iterator over a DataLoader ends its workers and threads when it is deleted
    left = [*_left_group(), *_left_processes(new), *_left_threads(threads)]
    multiprocessing.active_children()  # reaps those that have ended
    assert not left, f"the test left behind: {', '.join(left)}"


@pytest.fixture(autouse=True)
def process_state_is_restored() -> Iterator[None]:
    """Restore the environment, and what unitrain.init sets for the whole process."""
    environ = dict(os.environ)
    excepthook = sys.excepthook
    random_states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads = torch.get_num_threads()
    benchmark = torch.backends.cudnn.benchmark
    yield
    os.environ.clear()
    os.environ.update(environ)
    sys.excepthook = excepthook
    random.setstate(random_states[0])
    np.random.set_state(random_states[1])
    torch.set_rng_state(random_states[2])
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``sys.executable`` and the programs that are found in PATH forked (``forked_python``)."""
    forked_python.use(monkeypatch)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes that tests share. Remove the copies in memory of killed runs that saved to tests' folders."""
    warm.close_all()
    folders = getattr(config, "_tmp_path_factory", None)
    for file in () if folders is None else folders.getbasetemp().rglob("run.json"):
        shutil.rmtree(folder_of(str(file.parent.resolve())), ignore_errors=True)
    forked_python.close()


# ---------------------------------------------------------------------------------------------- what was skipped


def _lacking(reporter: Any) -> list[str]:
    """Return the reasons of skipped tests that continuous integration does not accept."""
    reasons = {report.longrepr[2] for report in reporter.stats.get("skipped", [])} if os.environ.get("CI") else ()
    return sorted(reason for reason in reasons if _REQUIRED.search(reason) and not reason.startswith(_OF_PAGES))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail continuous integration if tests are skipped for lack of something that it must have."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and session.exitstatus == pytest.ExitCode.OK and _lacking(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say why the run fails though no test did."""
    if reasons := _lacking(terminalreporter):
        terminalreporter.section("CONTINUOUS INTEGRATION MUST NOT SKIP THESE", sep="!", red=True, bold=True)
        for reason in reasons:
            terminalreporter.line(reason, red=True)
