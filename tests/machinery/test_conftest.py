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
