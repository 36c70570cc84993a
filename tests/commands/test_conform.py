"""``unitrain conform`` and its pytest plugin, run from another folder on an installed plug-in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT, TESTS

from unitrain.commands.cli import main

PLUGIN = TESTS / "plugin"
PAGE = (ROOT / "docs" / "guide" / "backends.md").read_text(encoding="utf-8")
[CODE] = re.findall(r"```python title=.+?\n(.*?)```", PAGE, re.DOTALL)
[PROJECT] = re.findall(r"```toml title=.+?\n(.*?)```", PAGE, re.DOTALL)


def test_the_plugin_of_the_page_is_the_one_that_is_tested_and_short() -> None:
    assert (PLUGIN / "unitrain_store.py").read_text() == CODE
    assert (PLUGIN / "pyproject.toml").read_text() == PROJECT
    assert len(CODE.splitlines()) <= 80


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page's plug-in, installed by pip into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    (source / "unitrain_store.py").write_text(CODE)
    (source / "pyproject.toml").write_text(PROJECT)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--disable-pip-version-check", "--target", target, source], check=True)
    return str(target)


def run(*command: str, path: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python where distributions in ``path`` are installed."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


UNITRAIN = ("-m", "unitrain.commands.cli")


@pytest.mark.slow("starts pytest and the ranks of a plug-in")
@pytest.mark.xdist_group("installed_plugin")
def test_a_plugin_is_judged_from_outside_under_its_own_settings(installed: str, tmp_path: Path) -> None:
    # What stands in an author's folder is for other tests.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise ZeroDivisionError\n")
    asked = ("--backend", "store", "--processes", "1,2", "--", "-k", "gathers or calls")
    done = run(*UNITRAIN, "conform", *asked, path=installed, folder=tmp_path, UNITRAIN_STORE__LEVEL="6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conftest.py", "pytest.ini"]


def test_a_wrong_backend_fails_with_its_mistake_in_the_text(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (PLUGIN, PLUGIN / "wrong"):
        monkeypatch.syspath_prepend(folder)
    asked = ("--backend", "sums_twice", "--processes", "2", "-k", "reductions or calls_in_another_thread")
    done = pytester.runpytest_inprocess("--pyargs", "unitrain.testing", "-p", "no:cacheprovider", *asked)
    done.assert_outcomes(failed=3)
    printed = done.stdout.str()
    assert "sums_twice-x2 fails the duty: all_reduce is exact for every operation, dtype and shape" in printed
    assert "failed its self-test: all_reduce with op 'sum' gave" in printed
    assert ", in calls_in_another_thread\n" in printed


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_plugin_of_the_page_does_every_duty_and_trains_as_the_plain_loop(installed: str, tmp_path: Path) -> None:
    contract = run(
        "-m", "pytest", "--pyargs", "unitrain.testing", "--backend", "store", path=installed, folder=tmp_path
    )
    assert contract.returncode == 0, contract.stdout + contract.stderr
    verified = run(*UNITRAIN, "verify", "--backend", "store", path=installed, folder=tmp_path)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_without_pytest_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert main(["conform", "--backend", "ddp"]) == 1
    assert "pip install 'unitrain[testing]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "Name the backend to test: pytest --pyargs unitrain.testing --backend NAME"),
        (("--backend", "dpp"), "Did you mean 'ddp'?"),
        (
            ("--backend", "ddp", "--processes", "2,two"),
            "--processes is '2,two', but must be one or more positive ints, comma-separated",
        ),
        (("--backend", "single", "--processes", "2"), "backend 'single' can't run on 2 processes"),
    ],
)
def test_wrong_options_are_one_message(pytester: pytest.Pytester, options: tuple[str, ...], said: str) -> None:
    result = pytester.runpytest_inprocess("--pyargs", "unitrain.testing", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *{said}*".replace("[", "[[]")])


def test_other_tests_keep_their_own_options(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_addoption(parser): parser.addoption('--backend', default='theirs')")
    pytester.makepyfile("def test_theirs(request): assert request.config.getoption('backend') == 'theirs'")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
