"""Programs of the fixture ``forked`` run and end as those of a new interpreter do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.check, pytest.mark.usefixtures("forked")]
SHOWS = """
import os, sys, __main__
print(sys.argv, sys.path[0], os.getcwd(), os.environ["GIVEN"], sorted(os.sched_getaffinity(0)), __name__)
print(sys.stdin.read(), file=sys.stderr)
"""


def run(*words: str, python: str = "", given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python or sys.executable, *words],
        input="typed",
        env={**os.environ, "GIVEN": given},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_program_sees_what_it_would_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = str(Path(sys.prefix, "bin", "python"))
    (tmp_path / "script.py").write_text(SHOWS)
    monkeypatch.chdir(tmp_path)
    for words in (["script.py", "a b", "--c"], ["-u", "-m", "script", "d"], ["-c", SHOWS, "e"]):
        ours, theirs = (run(*words, python=python, given="a\nbé") for python in (sys.executable, real))
        assert (ours.returncode, ours.stdout, ours.stderr) == (0, theirs.stdout, theirs.stderr)


@pytest.mark.parametrize(
    ("code", "returncode", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("import atexit; atexit.register(print, 'at the end')", 0, "at the end\n"),
        ("1 / 0", 1, 'File "<string>", line 1, in <module>\nZeroDivisionError'),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_a_program_ends_as_it_would_end(code: str, returncode: int, said: str) -> None:
    done = run("-c", code)
    assert done.returncode == returncode
    assert said in " ".join((done.stdout + done.stderr).split(" ")).replace("  ", "")
    assert "serving" not in done.stderr
