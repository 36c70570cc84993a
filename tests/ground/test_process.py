"""What the library prints ends no process and hangs none, wherever it goes; and which process is which."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from unitrain.process import kill_stalled, start_time

PRINTS = """
import os, sys, threading
from unitrain.process import exit_now, print_stacks, print_stderr, print_stdout
print_stdout("said")
print_stderr("said")
print_stacks("stacks")
threading.Thread(target=exit_now, args=(7, "ended")).start()
"""


def run(script: str, redirected: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f'exec "$@" {redirected}', "bash", sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("redirected", ["", ">&-", "2>&-", ">&- 2>&-", ">/dev/full", "2>/dev/full", "&>/dev/full"])
def test_what_can_t_be_printed_changes_no_exit_code(redirected: str) -> None:
    done = run(PRINTS, redirected)
    assert done.returncode == 7
    if "2>" not in redirected and "&>" not in redirected:
        first, *stacks, last = done.stderr.splitlines()
        assert (first, stacks[0], last) == ("said", "stacks", "ended")
        assert any("File" in line for line in stacks)
    if not redirected:
        assert done.stdout == "said\n"


def test_a_reader_that_has_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()
    assert process.wait(30) == 7


def test_a_reader_that_has_stopped() -> None:
    """The main thread is blocked in its own print, and holds the lock of stdout; so does another of stderr."""
    script = """
        import sys, threading, time
        from unitrain import process
        from unitrain.process import exit_now, print_stacks, print_stderr
        process._WRITE_S = process._FLUSH_S = 0.5
        def fill(stream):
            stream.write("x" * 2**20)
            stream.flush()
        threading.Thread(target=fill, args=(sys.stderr,), daemon=True).start()
        def end():
            time.sleep(0.5)
            print_stderr("y" * 10_000)
            print_stacks("stacks")
            exit_now(7, "ended")
        threading.Thread(target=end).start()
        fill(sys.stdout)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(30) == 7
        finally:
            process.kill()


def test_a_long_message_is_whole_and_a_notebook_s_stream_gets_it_too() -> None:
    script = """
        import io, sys
        from unitrain.process import print_stderr
        print_stderr("x" * 100_000)
        sys.stderr = io.StringIO()
        print_stderr("mine")
        print(sys.stderr.getvalue() == "mine\\n")
        class Broken:
            def write(self, text):
                raise RuntimeError
        sys.stderr = Broken()
        print_stderr("lost")
        sys.stderr = sys.__stderr__
    """
    done = run(script, "")
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert done.stderr == "x" * 100_000 + "\n"


def test_no_file_gets_the_number_of_a_closed_stream() -> None:
    script = """
        import os
        from unitrain.process import occupy_standard_descriptors
        occupy_standard_descriptors()
        with open("/dev/zero") as file:
            os._exit(file.fileno())
    """
    assert run(script, ">&- 2>&-").returncode == 3
    assert run(script, "<&- 2>&-").returncode == 3
    assert run(script, "").returncode == 3


def test_a_stalled_process_is_killed_although_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        started = start_time(process.pid)
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        booted = psutil.boot_time()
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + 3600)
        kill_stalled(process.pid, started + 1, aborts=True)
        assert process.poll() is None, "another process, which has the same id"
        kill_stalled(process.pid, started, aborts=True)
        assert process.wait(10) == -signal.SIGKILL
    kill_stalled(process.pid, started, aborts=True)  # it has ended by itself
