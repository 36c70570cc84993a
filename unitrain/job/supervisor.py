"""``unitrain run``: a command that is stopped in good order, started again where it fails, and outlived by nothing.

A stop goes to the ranks and past their launcher: mpirun would kill them 1 s after its own SIGTERM, horovodrun 5 s and
torchrun 30 s, which need not be enough for a checkpoint, and torchrun and horovodrun would die of a SIGUSR1.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from unitrain.errors import ConfigError, LaunchError
from unitrain.process import end_with_parent, tell

_PR_SET_CHILD_SUBREAPER = 36

# Done; a wrong setting; not finite; stopped by SIGINT, SIGUSR1 or SIGTERM. Once more, they would end the same way.
_ON_PURPOSE = frozenset({0, 2, 3, 130, 138, 143})
_STOPS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
# What says to a process that it is a rank, if it is not in this process's environment too.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK")

_QUICK_S = 10.0
_LONGEST_PAUSE_S = 30.0
# For a launcher to notice that its ranks have ended; mpirun takes 2 s where they did not at the same moment.
_LEAVE_S = 5.0
_LOOK_S = 1.0


def run(command: Sequence[str], *, max_restarts: int = 0) -> int:
    """Run a command and return the status to exit with: its own, or 128 and the number of the signal it died of.

    It is started again after an unexpected failure, at most ``max_restarts`` times. The first SIGTERM, SIGINT or
    SIGUSR1 is passed on, and what then ends is not started again; a second SIGTERM or SIGINT kills. Whatever the
    command has started ends with it: this is for a process that has no other children.

    Args:
        command: a program and its arguments.
        max_restarts: 0 or more.

    Raises:
        ConfigError: ``max_restarts`` is less than 0.
        LaunchError: there is no command, or it can't be started.
    """
    if max_restarts < 0:
        raise ConfigError(f"--max-restarts is {max_restarts}, but must be a whole number, 0 or more.")
    if not command:
        raise LaunchError("there is no command to run: write it after --, as in unitrain run -- mpirun -np 2 ...")
    # Orphans of the command become children of this process, whatever session they are in.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_STOPS, signal.SIGCHLD})
    try:
        return _run(command, max_restarts, before)
    finally:
        _kill_all()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(command: Sequence[str], max_restarts: int, mask: Iterable[int]) -> int:
    quick_failures = 0
    for restart in range(1, max_restarts + 2):
        started = time.monotonic()
        attempt = _Attempt(command, mask)
        code = attempt.wait()
        _kill_all()
        seconds = time.monotonic() - started
        if attempt.stopped or code in _ON_PURPOSE or not max_restarts:
            break
        ended = f"{command[0]} {_how(code)} after {seconds:.{0 if seconds >= 10 else 1}f} s"
        if restart > max_restarts:
            _say(f"{ended}; no restart of {max_restarts} is left.")
            break
        quick_failures = quick_failures + 1 if seconds < _QUICK_S else 0
        pause = min(2.0 ** (quick_failures - 1), _LONGEST_PAUSE_S) if quick_failures else 0.0
        _say(f"{ended}; restart {restart} of {max_restarts}{f' in {pause:g} s' if pause else ''}.")
        stop = signal.sigtimedwait(_STOPS, pause)
        if stop is not None:
            return 128 + stop.si_signo
    return code if code >= 0 else 128 - code


class _Attempt:
    """The command, started once."""

    def __init__(self, command: Sequence[str], mask: Iterable[int]) -> None:
        self.stopped = False
        self._told: list[psutil.Process] = []
        self._alone_since: float | None = None

        def prepare() -> None:
            # Who kills this process tells the command to stop; a launcher then ends its ranks.
            end_with_parent(signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        try:
            # In a session of its own, it gets a terminal's Ctrl-C from here only, once.
            self._process = subprocess.Popen(command, start_new_session=True, preexec_fn=prepare)
        except OSError as error:
            raise LaunchError(
                f"{command[0]!r} can't be started ({error.strerror}): give the name of a program on PATH, or its path."
            ) from error

    def wait(self) -> int:
        """Pass signals on until the command has ended; return its exit code, negative where a signal killed it."""
        terminated = False
        while True:
            got = signal.sigtimedwait({*_STOPS, signal.SIGCHLD}, _LOOK_S)
            if got is None or got.si_signo == signal.SIGCHLD:
                code = self._reap()
                if code is not None:
                    return code
                self._end_what_goes_on()
            elif terminated and got.si_signo != signal.SIGUSR1:
                _kill_all()
                self._process.returncode = -signal.SIGKILL
                return -got.si_signo
            elif not self.stopped or got.si_signo != signal.SIGUSR1:
                terminated = got.si_signo != signal.SIGUSR1
                self._stop(signal.Signals(got.si_signo))

    def _stop(self, number: signal.Signals) -> None:
        self.stopped = True
        self._told = _addressees(psutil.Process(self._process.pid), number)
        for process in self._told:
            _send(process, number)

    def _end_what_goes_on(self) -> None:
        """End a launcher that outlives the ranks that were told to stop: torchrun, say, which may start new ones."""
        if not self._told or any(process.is_running() for process in self._told):
            return
        if self._alone_since is None:
            self._alone_since = time.monotonic()
        elif time.monotonic() - self._alone_since > _LEAVE_S:
            self._told.clear()
            self._process.terminate()

    def _reap(self) -> int | None:
        """Take note of all children that have ended, the orphans that this process has adopted among them."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == self._process.pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                return self._process.returncode
            if pid == 0:
                return None


def _addressees(command: psutil.Process, number: signal.Signals) -> list[psutil.Process]:
    """Return whom a stop is for: the ranks on this host, or the command where it has none here.

    Of a shell and the program that it runs, it is for the one that handles the signal: the other would die of it.
    """
    ranks = list(_ranks(command)) or [command]
    return [process for rank in ranks for process in list(_handlers(rank, number)) or [rank]]


def _ranks(process: psutil.Process) -> Iterator[psutil.Process]:
    try:
        environ = process.environ()
        children = process.children()
    except psutil.Error:  # it has just ended
        return
    if any(name in environ and environ[name] != os.environ.get(name) for name in _RANK_VARIABLES):
        yield process
        return
    for child in children:
        yield from _ranks(child)


def _handlers(process: psutil.Process, number: signal.Signals) -> Iterator[psutil.Process]:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
        children = process.children()
    except (OSError, psutil.Error):
        return
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    if caught >> (number - 1) & 1:
        yield process
        return
    for child in children:
        yield from _handlers(child, number)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _kill_all() -> None:
    """Leave no process that descends from this one."""
    while True:
        for process in psutil.Process().children(recursive=True):
            _send(process, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)  # an orphan is a child of this process as soon as its parent has died
        except ChildProcessError:
            return


def _how(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _say(line: str) -> None:
    tell(f"unitrain run: {line}")
