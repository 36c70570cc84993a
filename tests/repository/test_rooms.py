"""The folders of the package: small enough to survey, and layered, so that none imports what imports it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.check

MOST_FILES = 12
MOST_BENCHMARKS = 13  # a script for each table of docs/about/tables.md
ROOTS = ("unitrain", "backends", "recipes", "tests", "benchmarks")
PACKAGES = sorted({path.parent.relative_to(ROOT) for path in (ROOT / "unitrain").rglob("*.py")})


@pytest.mark.parametrize(("root", "kind"), [("docs", "*.md"), *((root, "*.py") for root in ROOTS)])
def test_no_folder_has_more_files_than_one_can_survey(root: str, kind: str) -> None:
    most = MOST_BENCHMARKS if root == "benchmarks" else MOST_FILES
    by_folder = Counter(path.parent for path in (ROOT / root).rglob(kind) if path.name != "__init__.py")
    assert {str(folder): count for folder, count in by_folder.items() if count > most} == {}


def imported(path: Path) -> Iterator[str]:
    """Yield the modules and names that a file imports: at its top, in a function, or for types."""
    for node in ast.walk(ast.parse(path.read_text())):
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


def uses(folder: Path) -> dict[str, set[str]]:
    """Return the files and folders of a package, each with those that it imports."""
    package = str(folder).replace("/", ".")
    graph: dict[str, set[str]] = {}
    for path in (ROOT / folder).rglob("*.py"):
        parts = path.relative_to(ROOT / folder).parts
        if parts == ("__init__.py",):
            continue  # it may name anything of the package
        name = parts[0].removesuffix(".py")
        entries = {entry(package, module) for module in imported(path)}
        graph.setdefault(name, set()).update(used for used in entries if used not in (None, name))
    return graph


@pytest.mark.parametrize("folder", PACKAGES, ids=str)
def test_the_files_and_folders_of_a_package_import_each_other_in_one_direction(folder: Path) -> None:
    try:
        TopologicalSorter(uses(folder)).prepare()
    except CycleError as error:
        pytest.fail(f"{folder}: {' <- '.join(error.args[1])} is a circle")


def test_folders_import_in_the_declared_order() -> None:
    page = (ROOT / "docs" / "about" / "architecture.md").read_text()
    [declared] = re.findall(r"^Each line imports only .+?^```text\n(.+?)^```", page, re.MULTILINE | re.DOTALL)
    lines = {name: number for number, line in enumerate(declared.splitlines()) for name in line.split()}
    graph = uses(Path("unitrain"))
    assert set(lines) == set(graph)
    upward = [f"{user} -> {used}" for user, all_used in graph.items() for used in all_used if lines[used] > lines[user]]
    assert upward == []
