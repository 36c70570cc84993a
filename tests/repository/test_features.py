"""A feature is a folder that can be deleted: the core does not name it, and works without it."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT
from test_lines_of_code import files

from unitrain import features
from unitrain.config import Section

FOLDER = ROOT / "unitrain" / "features"
FEATURES = {module.__name__.rpartition(".")[2]: module for module in features.modules()}

# Where the core may have the name of a feature, and why. The list may only get shorter.
EXCEPTIONS = {
    "horovod_elastic": {
        "unitrain/launch/detect.py": "horovodrun's variable, which tells of its launcher",
    },
    "notebook": {
        "unitrain/job/starting/spawn.py": "a place to write scripts in, which spawn can't import from",
        "unitrain/process.py": "as above: its stream has no file descriptor",
    },
    "sync_batchnorm": {
        "unitrain/compat/horovod/sync_batch_norm.py": "Horovod's name of a layer, which scripts import",
    },
}  # fmt: skip


def settings_of(feature: str) -> dict[str, object]:
    """Return the settings that a feature adds to a run's, with their defaults."""
    declared: type[Section] | None = getattr(FEATURES[feature], "Settings", None)
    return {} if declared is None else declared().model_dump(mode="json")


def names_of(feature: str) -> Iterator[str]:
    """Yield patterns of names by which the core could know a feature: its settings, exports, files and classes."""
    for name in settings_of(feature):
        yield name if "_" in name else rf"(?:config|settings|resolved)\.{name}"
    yield from getattr(FEATURES[feature], "__all__", ())
    for path in (FOLDER / feature).rglob("*.py"):
        classes = (node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
        for name in (path.stem, *classes):
            # Private names are out of reach, and those of a single word, such as Totals, are common.
            if not name.startswith("_") and re.search(r"[a-z]_?[A-Z]|[a-z]_[a-z]", name):
                yield name


def pattern_of(feature: str) -> re.Pattern[str]:
    """Return what finds the names of a feature in code and text, the folder's also in words: "local SGD"."""
    words = feature.removesuffix("s").replace("_", "[-_ ]")
    return re.compile(rf"(?<![A-Za-z])(?:{'|'.join([f'(?i:{words}s?)', *names_of(feature)])})(?![A-Za-z])")


@pytest.mark.parametrize("feature", FEATURES)
def test_the_core_does_not_name_a_feature(feature: str) -> None:
    pattern = pattern_of(feature)
    named: dict[str, list[str]] = {}
    for path, source in files():
        lines = enumerate(source.splitlines(), 1)
        found = [f"{number}: {line.strip()}" for number, line in lines if pattern.search(line)]
        if found and not (ROOT / path).is_relative_to(FOLDER):
            named[str(path)] = found
    allowed = EXCEPTIONS.get(feature, {})
    assert {path: lines for path, lines in named.items() if path not in allowed} == {}
    assert [path for path in allowed if path not in named] == [], "remove these exceptions"


# ------------------------------------------------------------------------------------------------- without its folder

# The tree comes first on the path. What is not in it must not be found in this checkout, which is installed.
_SITE = """
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if not finder.__module__.startswith("__editable__")]
"""
# Prints what is imported, and what each setting as an argument and as a variable leads to.
_PROGRAM = """
import json
import os
import sys
import warnings
from importlib.util import find_spec

import unitrain

feature, settings = sys.argv[1], json.loads(sys.argv[2])
found = {"package": unitrain.__file__, "feature": find_spec(f"unitrain.features.{feature}") is not None}
for name, value in settings.items():
    try:
        unitrain.init(backend="single", device="cpu", **{name: value})
    except unitrain.ConfigError as error:
        found[name] = str(error)
    inner = next(iter(value)) if isinstance(value, dict) else ""
    variable = f"UNITRAIN_{name}__{inner}".rstrip("_").upper()
    os.environ[variable] = "1"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unitrain.init(backend="single", device="cpu").close()
    found[variable] = "".join(str(warning.message) for warning in caught)
    del os.environ[variable]
print(json.dumps(found))
"""
TIMEOUT_S = 900  # mypy's first run, on a busy machine
without_its_folder = [
    pytest.mark.all("the proof that folders can be deleted"),
    pytest.mark.xdist_group("features"),
    pytest.mark.timeout(TIMEOUT_S),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package as it is installed, with backends in it."""
    tree = tmp_path_factory.mktemp("installed")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "unitrain", "backends"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in ["pyproject.toml", *filter(None, names)]:
        place = tree / (f"unitrain/{name}" if name.startswith("backends/") else name)
        if (ROOT / name).is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place)
    (tree / "sitecustomize.py").write_text(_SITE)
    return tree


@pytest.fixture
def tree(installed: Path, feature: str, tmp_path: Path) -> Iterator[Path]:
    """Return the copy of the package without a feature."""
    folder = installed / "unitrain" / "features" / feature
    shutil.move(folder, tmp_path / feature)
    yield installed
    shutil.move(tmp_path / feature, folder)


def run(tree: Path, *command: str) -> str:
    """Run a Python program with the package of a tree, and return what it prints."""
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    ran = subprocess.run(
        [sys.executable, *command], cwd=tree, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("feature", [pytest.param(name, marks=without_its_folder) for name in FEATURES])
def test_without_its_folder_a_feature_is_unknown(tree: Path, feature: str) -> None:
    settings = settings_of(feature)
    found = json.loads(run(tree, "-c", _PROGRAM, feature, json.dumps(settings)).splitlines()[-1])
    assert Path(found.pop("package")).is_relative_to(tree)
    assert not found.pop("feature")
    assert {name for name in found if not name.startswith("UNITRAIN_")} == settings.keys(), "all must be refused"
    for name, message in found.items():
        unknown = "is not an environment variable of UniTrain, and is ignored" if name.isupper() else "is not a setting"
        assert message.startswith(f"{name} {unknown}."), message


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="mypy can't read numpy's stubs for Python 3.12 and later as Python 3.10"
)
@pytest.mark.parametrize("feature", [pytest.param(name, marks=without_its_folder) for name in FEATURES])
def test_without_its_folder_types_are_right(tree: Path, feature: str) -> None:
    run(tree, "-m", "mypy", "--cache-dir", str(tree / ".mypy_cache"), "unitrain")


@pytest.mark.parametrize("feature", [pytest.param(name, marks=without_its_folder) for name in FEATURES])
def test_without_its_folder_two_ranks_keep_the_contract(tree: Path, feature: str) -> None:
    unitrain = str(Path(sysconfig.get_path("scripts"), "unitrain"))
    # Without the duties that have processes to themselves: they take half of the time.
    options = ["--", "-k", "not starts_as_often_as_asked and not of_one_rank"]
    printed = run(tree, unitrain, "conform", "--backend", "ddp", "--processes", "2", *options)
    assert re.search(r"^\d+ passed, \d+ deselected in ", printed, re.MULTILINE), printed
