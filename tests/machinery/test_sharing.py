"""How ``make test`` divides the tests: one worker runs a group, and tests that must run alone come last."""

from __future__ import annotations

import itertools
import json
from typing import NamedTuple

import places
import pytest

pytestmark = pytest.mark.check

PLUGIN = places.TESTS / "support" / "hosts" / "sharing.py"
TESTS = """
    import json, os, time
    import pytest

    @pytest.fixture(autouse=True)
    def noted(request):
        start = time.monotonic()
        yield
        row = [request.node.nodeid, os.getpid(), start, time.monotonic()]
        with open("notes", "a") as notes:
            notes.write(json.dumps(row) + "\\n")

    @pytest.mark.alone
    @pytest.mark.parametrize("number", range(2))
    def test_alone(number): time.sleep(0.1)

    @pytest.mark.parametrize("number", range(6))
    def test_short(number): time.sleep(0.05)

    @pytest.mark.xdist_group("daemons")
    @pytest.mark.parametrize("number", range(3))
    def test_group(number): time.sleep(0.05)

    @pytest.fixture(scope="module")
    def slowly_made(): time.sleep(0.1)

    @pytest.mark.parametrize("number", range(3))
    def test_sharing(slowly_made, number): time.sleep(0.05)

    @pytest.mark.launcher
    @pytest.mark.parametrize("number", range(2))
    def test_long(number): time.sleep(0.3)

"""


class Note(NamedTuple):
    test: str
    process: int
    start: float
    end: float


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN.parent))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to load than all of this takes
    pytester.makeini("[pytest]\naddopts = -p xdist -p sharing -p no:cacheprovider\nmarkers =\n    alone\n    launcher")
    pytester.makepyfile(TESTS)
    return pytester


def notes(suite: pytest.Pytester) -> list[Note]:
    return [Note(*json.loads(line)) for line in (suite.path / "notes").read_text().splitlines()]


def test_groups_stay_together_and_what_runs_alone_is_last(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess("-n2")
    result.assert_outcomes(passed=16)
    made = notes(suite)
    assert len({note.process for note in made}) == 2
    for together in ("::test_group", "::test_sharing"):
        assert len({note.process for note in made if together in note.test}) == 1
    alone = [note for note in made if "::test_alone" in note.test]
    assert len(alone) == 2
    assert all(one.end <= other.start for one, other in itertools.product(made, alone) if one not in alone)
    assert {note.test.split("::")[1] for note in sorted(made, key=lambda note: note.start)[:2]} == {
        "test_long[0]", "test_long[1]",
    }  # fmt: skip
