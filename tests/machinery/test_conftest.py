"""The suite's own rules: a test that leaves something behind fails, and a skip may fail in CI."""

from __future__ import annotations

import os

import pytest
from places import TESTS

pytestmark = pytest.mark.check

CONFTEST = TESTS / "conftest.py"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    imported = ("support", "support/forking", "support/hosts", "faults/support", "faults/programs")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(TESTS / folder) for folder in imported))
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider\n")
    return pytester


def test_leaks_fail_the_test_that_left_them(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import subprocess, sys, threading
        import torch.distributed as dist

        import conftest
        conftest._LEAVE_S = 0.1
        stop = threading.Event()

        def test_process():
            global process
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

        def test_thread():
            threading.Thread(target=stop.wait, name="left over").start()

        def test_group():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

        def test_clean():
            stop.set()
            process.wait()
        """
    )
    result = suite.runpytest_inprocess()
    result.assert_outcomes(passed=4, errors=3)
    result.stdout.fnmatch_lines(["*left behind: process * (*time.sleep(60)*", "*left behind: thread left over"])
    result.stdout.fnmatch_lines(["*left behind: a process group*"])


@pytest.mark.parametrize(("marks", "hidden"), [("", True), ("not gpu", True), ("gpu or fast", False)])
def test_gpus_are_hidden_unless_asked_for(suite: pytest.Pytester, marks: str, hidden: bool) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    suite.runpytest_inprocess("-W", "ignore", "-m", marks)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "0")


def test_state_is_restored(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import os, sys
        import torch, unitrain
        from unitrain.job import job

        threads, hook = torch.get_num_threads(), sys.excepthook

        def test_one():
            os.environ["UNITRAIN_ONE"] = "set"
            del os.environ["PATH"]
            unitrain.init(backend="single")
            torch.set_num_threads(threads + 1)
            assert sys.excepthook is not hook

        def test_other():
            assert "UNITRAIN_ONE" not in os.environ and "PATH" in os.environ
            assert torch.get_num_threads() == threads
            assert sys.excepthook is hook
            assert job.current().ended
        """
    )
    suite.runpytest_subprocess().assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("reason", "ci", "code"),
    [
        ("Horovod is not installed", "true", 1),
        ("no MPI here", "", 0),
        ("no GPU", "true", 0),
        ("a block of the documentation: another test runs Horovod's", "true", 0),
    ],
)
def test_skips_fail_ci_where_the_engine_is_missing(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, reason: str, ci: str, code: int
) -> None:
    monkeypatch.setenv("CI", ci)
    suite.makepyfile(f"import pytest\ndef test_it(): pytest.skip({reason!r})")
    result = suite.runpytest_inprocess()
    assert result.ret == code
    if code:
        result.stdout.fnmatch_lines(["*MUST NOT SKIP*", f"Skipped: {reason}"])
