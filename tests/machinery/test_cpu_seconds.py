"""The CPU seconds of a test are those of all processes that it starts, and many of them need a reason."""

from __future__ import annotations

from pathlib import Path

import cpu_seconds
import pytest

pytestmark = pytest.mark.check
SPEND = "import time\\nwhile time.process_time() < {}: pass"
SUITE = f"""
    import subprocess, sys
    import pytest

    def spend(cpu_s):
        subprocess.run([sys.executable, "-c", "{SPEND}".format(cpu_s)], check=True)

    def test_short(): ...

    def test_long(): spend(0.4)

    def test_longest(): spend(0.8)

    @pytest.mark.slow("it computes")
    def test_with_a_reason(): spend(0.8)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makeini("[pytest]\naddopts = -p cpu_seconds -p no:cacheprovider\nmarkers =\n    slow\n    all")
    # So that the test of the limit does not take longer than what it limits.
    monkeypatch.setattr(cpu_seconds, "LIMIT_S", 0.3)
    monkeypatch.setattr(cpu_seconds, "FAILS_S", 0.6)
    return pytester


def test_what_takes_long_without_a_reason_is_said_and_fails_from_twice_as_long_on(suite: pytest.Pytester) -> None:
    suite.makepyfile(SUITE)
    result = suite.runpytest_inprocess("--cpu-seconds", "made/seconds.tsv")
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    told = [line.partition(": ")[2] for line in result.outlines if " s: test_" in line]
    assert [test.partition("::")[2] for test in told] == ["test_longest", "test_long"]
    rows = [line.split("\t") for line in Path(suite.path, "made", "seconds.tsv").read_text().splitlines()]
    assert [(test.partition("::")[2], reason) for _, test, reason in rows if reason] == [
        ("test_with_a_reason", "it computes")
    ]
    assert len(rows) == 4
    assert float(rows[-1][0]) < 0.2
    assert suite.runpytest_inprocess("-k", "not longest").ret == pytest.ExitCode.OK


@pytest.mark.parametrize("name", ["slow", "all"])
def test_a_mark_without_a_reason_is_refused(suite: pytest.Pytester, name: str) -> None:
    suite.makepyfile(f"import pytest\n@pytest.mark.{name}\ndef test_it(): ...")
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*test_it: give the mark {name} the reason *"])
