"""The released packages have the files that git has, and work with only their declared dependencies."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution, distributions, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from places import ROOT

pytestmark = pytest.mark.check
LIBRARY = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")


def files_of_git() -> list[str]:
    """Return the files of this checkout that git has, or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(name for name in names if (ROOT / name).is_file())


@dataclass(frozen=True)
class Release:
    """What ``make dist`` made."""

    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Run ``make dist`` in a copy of this checkout that has all committed; it checks with twine, too."""
    source = tmp_path_factory.mktemp("release") / "source"
    for name in files_of_git():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    author = ["-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "core.hooksPath=/dev/null"]
    for command in (["init", "--quiet"], ["add", "--all"], [*author, "commit", "--quiet", "--message", "all"]):
        subprocess.run(["git", *command], cwd=source, check=True)
    # With this environment as it is: nothing is installed, to build in or otherwise.
    options = [f"VENV={sys.prefix}", f"--old-file={sys.prefix}/.has-test", "ARGS=--no-isolation"]
    run = subprocess.run(["make", "dist", *options], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("PASSED") == 2
    assert "is absent from the `packages` configuration" not in run.stdout + run.stderr
    (wheel,), (sdist,) = (source / "dist").glob("*.whl"), (source / "dist").glob("*.tar.gz")
    return Release(wheel, sdist)


def test_the_sdist_holds_what_git_has(release: Release) -> None:
    with tarfile.open(release.sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    made = {"PKG-INFO", "setup.cfg", *(name for name in held if name.startswith("unitrain.egg-info/"))}
    assert held - made == set(files_of_git())


def test_the_wheel_holds_every_module(release: Release) -> None:
    held = {name for name in zipfile.ZipFile(release.wheel).namelist() if ".dist-info/" not in name}
    modules = {name for name in files_of_git() if re.fullmatch(r"(unitrain|backends|recipes)/.+\.py", name)}
    inside = {name if name.startswith("unitrain/") else f"unitrain/{name}" for name in modules}
    assert held == {*inside, "unitrain/py.typed"}


def declared(by: Distribution, extras: set[str], seen: set[str]) -> Iterator[Distribution]:
    """Yield the distributions that one asks for, and those that these ask for, as they are installed here."""
    for line in by.requires or ():
        needed = Requirement(line)
        if needed.marker is not None and not any(needed.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if (key := f"{needed.name.lower()} {sorted(needed.extras)}") not in seen:
            seen.add(key)
            found = distribution(needed.name)
            yield found
            yield from declared(found, needed.extras or {""}, seen)


@dataclass(frozen=True)
class CleanEnvironment:
    """A virtual environment with a wheel and what it declares, and nothing else of what is installed here.

    What it declares is linked to, since torch alone is several GB.
    """

    folder: Path

    @classmethod
    def make(cls, folder: Path, wheel: Path, extra: str) -> CleanEnvironment:
        venv.create(folder, symlinks=True)
        (unitrain,) = distributions(path=[str(wheel)])
        for needed in declared(unitrain, {extra}, set()):
            for top in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
                if not (folder / LIBRARY / top).exists():
                    (folder / LIBRARY / top).symlink_to(Path(str(needed.locate_file(top))))
        pip = [sys.executable, "-m", "pip", "--isolated", "--python", str(folder / "bin" / "python")]
        # Without an index, pip fails where what is linked does not fulfil what the wheel declares.
        subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-compile", str(wheel)], check=True)
        return cls(folder)

    def run(self, program: str, *arguments: str) -> str:
        """Return what one of its programs prints. It is run outside the checkout."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        environment |= {"PATH": f"{self.folder / 'bin'}:{os.defpath}", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [str(self.folder / "bin" / program), *arguments]
        run = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout


@pytest.fixture(scope="module")
def with_recipes(release: Release, tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    return CleanEnvironment.make(tmp_path_factory.mktemp("recipes"), release.wheel, "recipes")


def test_what_the_wheel_declares_is_enough(release: Release, tmp_path: Path) -> None:
    environment = CleanEnvironment.make(tmp_path, release.wheel, "")
    assert "install-horovod" in environment.run("unitrain", "--help")
    found: dict[str, Any] = json.loads(environment.run("python", str(ROOT / "tests" / "programs" / "installed.py")))
    assert Path(found["file"]).is_relative_to(tmp_path / LIBRARY)
    losses = found["losses"]
    assert "unitrain install-horovod" in losses.pop("horovod")  # which no index has as a wheel
    assert list(losses) == ["data_parallel", "ddp", "fsdp", "single"]
    assert all(loss == pytest.approx(losses["single"], abs=1e-6) for loss in losses.values())


def test_the_recipe_of_the_wheel_trains(with_recipes: CleanEnvironment, tmp_path: Path) -> None:
    said = with_recipes.run("python", "-m", "unitrain.recipes.resnet", "--max-steps=2", f"--output-dir={tmp_path}")
    assert str(tmp_path) in said
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == 2


def test_every_public_type_is_known(with_recipes: CleanEnvironment) -> None:
    """As a user's type checker sees the wheel: pyright finds the one whose Python is first on the path."""
    pyright = [str(Path(sysconfig.get_path("scripts")) / "pyright"), "--verifytypes", "unitrain", "--ignoreexternal"]
    path = f"{with_recipes.folder / 'bin'}:{os.environ['PATH']}"
    run = subprocess.run(
        pyright, cwd=with_recipes.folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert str(with_recipes.folder / LIBRARY / "unitrain" / "py.typed") in run.stdout


def test_each_dependency_has_a_lowest_version() -> None:
    """``make test-oldest`` installs these versions."""
    needed = [Requirement(line) for line in distribution("unitrain").requires or ()]
    unbound = [
        str(requirement)
        for requirement in needed
        if requirement.name != "unitrain" and not {bound.operator for bound in requirement.specifier} & {">=", "=="}
    ]
    assert not unbound


def test_the_changelog_and_the_citation_have_the_version() -> None:
    (declared_version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version("unitrain") == declared_version, "run pip install -e . again"
    heading = rf"^## {re.escape(declared_version)} - (unreleased|\d{{4}}-\d\d-\d\d)$"
    assert re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    # Valid by cffconvert, which fits no other library here: these are what the format requires, and what we have.
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    required, metadata = {"cff-version", "message", "title", "authors"}, distribution("unitrain").metadata
    assert set(citation) == required | {"abstract", "keywords", "license", "type", "version"}
    assert (citation["version"], citation["license"]) == (declared_version, metadata["License-Expression"])
    assert (citation["abstract"], citation["keywords"]) == (metadata["Summary"], metadata["Keywords"].split(","))


def test_only_the_tag_of_the_version_is_released() -> None:
    options = [f"VENV={sys.prefix}", f"--old-file={sys.prefix}/.has-test", "TAG=v9.9.9"]
    run = subprocess.run(["make", "dist", *options], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "v9.9.9 must be a v and the version in pyproject.toml" in run.stderr


def test_each_workflow_runs_targets_of_the_makefile() -> None:
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*.yml")}
    assert set(workflows) == {"docs", "gpu", "release", "tests"}
    for name, workflow in workflows.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        commands = [re.sub(r"\$\{\{.*?\}\}", "filled-in-by-GitHub", step["run"]) for step in steps if "run" in step]
        assert commands, name
        for command in commands:
            assert command.startswith("make "), command
            dry = command.replace("make ", "make --dry-run ", 1)
            subprocess.run(["bash", "-euc", dry], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": ""}, check=True)
    supported = [
        line.split()[-1] for line in distribution("unitrain").metadata.get_all("Classifier") or () if " 3." in line
    ]
    assert workflows["tests"]["jobs"]["oldest"]["strategy"]["matrix"]["python"] == supported
