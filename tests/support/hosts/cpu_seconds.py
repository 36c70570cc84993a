"""A pytest plugin: the CPU seconds of each test, with all processes that it starts, and a limit to them.

``--cpu-seconds FILE`` writes a line for each test, the most expensive first: its seconds, its name, and the reason that
its mark gives for taking long. What tests share is charged to the first of them (a fixture of a module), or to none
(collection, and starting the processes from which others are forked).

A test that takes more than 5 s has a mark with the reason: ``launcher``, ``all`` or ``slow``. The summary lists those
that have none. Processors differ, and so does what else they do, so only four times as many seconds fail the run.
"""

from __future__ import annotations

from collections.abc import Generator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import forked_python
import pytest
from descendants import descendants, this_process

LIMIT_S = 5.0
FAILS_S = 4 * LIMIT_S
_CPU_S, _REASON = "cpu_s", "reason"


class _Meter:
    """Measures the CPU seconds from one test to the next, in the process that runs them."""

    def __init__(self) -> None:
        self._last = self._total()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, pytest.TestReport]:
        """Add the time of a test to the report of its end."""
        report: pytest.TestReport = yield
        if call.when == "teardown":
            last, self._last = self._last, self._total()
            report.user_properties += [(_CPU_S, max(self._last - last, 0.0)), (_REASON, _reason_of(item))]
        return report

    def _total(self) -> float:
        shared = _shared_processes()
        processes = [this_process(), *descendants()]
        return sum(process.reaped_s + (process.pid not in shared) * process.own_s for process in processes)


class _Costs:
    """Collects what the tests of a run take, in the process that prints the result."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._tests: list[tuple[float, str, str]] = []
        self._fails = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that has been torn down."""
        properties = dict(report.user_properties)
        if _CPU_S in properties:
            self._tests.append((float(str(properties[_CPU_S])), report.nodeid, str(properties[_REASON])))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file, and fail the run if a test takes far too long without a reason."""
        self._tests.sort(reverse=True)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text("".join(f"{cpu_s:.2f}\t{test}\t{reason}\n" for cpu_s, test, reason in self._tests))
        self._fails = session.exitstatus == pytest.ExitCode.OK and bool(self._too_long(FAILS_S))
        if self._fails:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what all tests have taken, and which take long without a reason."""
        if too_long := self._too_long(LIMIT_S):
            title = f"MORE THAN {LIMIT_S:.0f} CPU SECONDS, AND NO MARK SAYS WHY"
            terminalreporter.section(title, sep="!", yellow=True, bold=True)
            for line in too_long:
                terminalreporter.line(line, yellow=True)
        if self._fails:
            terminalreporter.line(f"No test failed, but the run fails: one of these took {FAILS_S:.0f} s.", red=True)
        if self._file is not None:
            total = sum(cpu_s for cpu_s, *_ in self._tests)
            terminalreporter.line(f"{len(self._tests)} tests took {total:.0f} CPU seconds. {self._file} lists them.")

    def _too_long(self, limit_s: float) -> list[str]:
        return [f"{cpu_s:.1f} s: {test}" for cpu_s, test, reason in self._tests if cpu_s > limit_s and not reason]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--cpu-seconds", metavar="FILE", type=Path, help="write the CPU seconds of each test to a file")


def pytest_configure(config: pytest.Config) -> None:
    """Have the process that prints the result collect what tests take."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Costs(config.option.cpu_seconds), "costs of tests")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse marks without a reason, and begin to measure."""
    for item in session.items:
        for name in ("all", "slow"):
            if any(not mark.args for mark in item.iter_markers(name)):
                raise pytest.UsageError(f"{item.nodeid}: give the mark {name} the reason why the test takes long")
    session.config.pluginmanager.register(_Meter(), "meter of tests")


def _reason_of(item: pytest.Item) -> str:
    given = next((str(mark.args[0]) for name in ("all", "slow") for mark in item.iter_markers(name)), "")
    return given or next((name for name in ("launcher", "soak", "check", "gpu") if item.get_closest_marker(name)), "")


def _shared_processes() -> set[int]:
    """Return the processes that fork others, whose start is no test's."""
    servers: set[int] = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    return servers | forked_python.pids()
