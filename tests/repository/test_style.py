"""Style and types: every check of .pre-commit-config.yaml passes, and git runs them after ``make hooks``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from places import ROOT

pytestmark = pytest.mark.check
CHECKS = [
    hook["id"]
    for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repository["hooks"]
]
needs_old_stubs = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="mypy can't read numpy's stubs for Python 3.12 and later as Python 3.10"
)


@pytest.fixture(autouse=True)
def pre_commit_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRE_COMMIT_HOME", str(tmp_path / "pre-commit"))


@pytest.mark.parametrize("check", [pytest.param(c, marks=[needs_old_stubs] if c == "mypy" else []) for c in CHECKS])
def test_style_and_types(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", sysconfig.get_path("scripts"), prepend=os.pathsep)
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files", check]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_git_checks_a_commit_outside_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in (".pre-commit-config.yaml", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=checkout, capture_output=True, text=True)

    assert run("git", "init", "--quiet").returncode == 0
    # Its environment is this one, as it is.
    hooks = run("make", "hooks", f"VENV={sys.prefix}", f"--old-file={sys.prefix}/.has-test")
    assert hooks.returncode == 0, hooks.stdout + hooks.stderr
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("SKIP", "mypy")  # of what is not there
    author = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    for text, refused in (("x=1\n", True), ("x = 1\n", False)):
        (checkout / "module.py").write_text(f'"""A module."""\n\n{text}')
        run("git", "add", "--all")
        commit = run("git", *author, "commit", "--message", "a module")
        assert (commit.returncode != 0) == refused, commit.stdout + commit.stderr
        assert ("hook id: ruff-format" in commit.stdout + commit.stderr) == refused
