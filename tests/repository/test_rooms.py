"""The folders of the package: small enough to survey, and layered, so that none imports what imports it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from places import ROOT

MOST_FILES = 12
ROOTS = ("unitrain", "backends", "recipes", "tests", "benchmarks")
PACKAGES = sorted({path.parent.relative_to(ROOT) for path in (ROOT / "unitrain").rglob("*.py")})


def files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if path.name != "__init__.py"]


@pytest.mark.parametrize("root", ROOTS)
def test_no_folder_has_more_files_than_one_can_survey(root: str) -> None:
    folders = {path.parent for path in (ROOT / root).rglob("*.py")}
    assert {str(f.relative_to(ROOT)): len(files(f)) for f in folders if len(files(f)) > MOST_FILES} == {}


def test_no_folder_has_more_pages_than_one_can_survey() -> None:
    folders = {path.parent for path in (ROOT / "docs").rglob("*.md")}
    assert {str(f): len(list(f.glob("*.md"))) for f in folders if len(list(f.glob("*.md"))) > MOST_FILES} == {}


def imported(path: Path) -> Iterator[str]:
    """Yield the modules and names that a file imports when it runs: at its top or in a function, not for types only."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def entry(package: str, module: str) -> str | None:
    """Return the file or folder of a package that a module is in."""
    if not module.startswith(f"{package}."):
        return None
    name = module.removeprefix(f"{package}.").partition(".")[0]
    place = ROOT / package.replace(".", "/") / name
    return name if place.is_dir() or place.with_suffix(".py").is_file() else None


@pytest.mark.parametrize("folder", PACKAGES, ids=str)
def test_the_files_and_folders_of_a_package_import_each_other_in_one_direction(folder: Path) -> None:
    package = str(folder).replace("/", ".")
    uses: dict[str, set[str]] = {}
    for path in (ROOT / folder).rglob("*.py"):
        inner = path.relative_to(ROOT / folder)
        if inner.name == "__init__.py" and len(inner.parts) == 1:
            continue  # it may name anything of the package
        name = inner.parts[0].removesuffix(".py")
        found = {one for module in imported(path) if (one := entry(package, module)) is not None}
        uses.setdefault(name, set()).update(found - {name})
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        pytest.fail(f"{package}: {' <- '.join(error.args[1])} is a circle")
