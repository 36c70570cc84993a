"""The public API, the cost and side effects of the import, and the rules on which layer imports which."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from places import ROOT
from test_lines_of_code import lines_of

import unitrain
from unitrain import ConfigError, UnitrainError, errors
from unitrain.communication.backend import GROUP, backend_names, load_backend

pytestmark = pytest.mark.check

# A backend is a file, or a folder with a file backend.py.
BUILT_IN = sorted(
    {path.stem for path in (ROOT / "backends").glob("[!_]*.py")}
    | {path.parent.name for path in (ROOT / "backends").glob("*/backend.py")} - {"process_group"}
)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=120, cwd=ROOT / "tests"
    )


def test_public_names_are_these() -> None:
    assert dir(unitrain) == [
        "Backend", "BackendError", "BatchGroup", "CheckpointError", "CommunicationError", "ConfigError", "DataError",
        "Feature", "Launch", "LaunchError", "Loader", "Meter", "ModulePass", "NonFiniteError", "Section", "StepResult",
        "Stopped", "Strategy", "StrategyConfig", "UnitrainError", "UsageError", "dump_yaml", "init",
        "parse_command_line", "spawn",
    ]  # fmt: skip
    assert unitrain.__version__ == version("unitrain")  # type: ignore[attr-defined]
    assert all(getattr(unitrain, name).__module__.startswith("unitrain.") for name in dir(unitrain))
    with pytest.raises(AttributeError, match="module 'unitrain' has no attribute 'Checkpoint'"):
        unitrain.Checkpoint  # type: ignore[attr-defined]  # noqa: B018


def test_a_strategy_has_few_names() -> None:
    with unitrain.init(device="cpu") as strategy:
        assert len([name for name in dir(strategy) if not name.startswith("_")]) <= 36


def test_a_communicator_and_a_backend_have_few_names() -> None:
    with unitrain.init(device="cpu") as strategy:
        public = {name for name in dir(strategy.communicator) if not name.startswith("_")}
        assert public - {"collectives", "sharding"} == {
            "all_gather", "all_gather_data", "all_gather_object", "all_reduce", "barrier", "broadcast",
            "broadcast_data", "broadcast_object", "device", "is_main", "on_main", "part", "rank", "twin", "warn",
            "world_size",
        }  # fmt: skip
        assert len([name for name in dir(strategy._backend) if not name.startswith("_")]) <= 37


def test_every_error_is_public_and_in_the_drawing() -> None:
    found = {value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)}
    assert {error.__name__ for error in found} <= set(dir(unitrain))
    assert all(error.__base__ is UnitrainError for error in found - {UnitrainError})
    assert all(error.__name__ in str(errors.__doc__) for error in found)


def test_import_brings_no_engine_along() -> None:
    code = "import sys, torch; before = set(sys.modules); from unitrain import *"
    names = "from unitrain.communication.backend import backend_names; backend_names()"
    modules = set(python("-c", f"{code}; {names}; print(*set(sys.modules) - before)").stdout.split())
    unwanted = {
        "horovod", "mpi4py", "fsspec", "torchvision", "sklearn", "scipy", "tensorboard", "torchmetrics", "tqdm", "rich",
    }  # fmt: skip
    assert not {module.split(".")[0] for module in modules} & unwanted
    # Backends are imported, for their settings; what they communicate with is not.
    assert not {module for module in modules if module.startswith("unitrain.recipes")}
    assert not {"torch._dynamo", "torch._inductor"} & modules  # 2 s


def test_torch_is_imported_with_the_first_name_that_needs_it() -> None:
    code = "import sys, unitrain; unitrain.ConfigError, unitrain.Launch; print('torch' in sys.modules)"
    assert python("-c", code).stdout == "False\n"
    names = "from unitrain import *; print(*sorted(name for name in globals() if name[0] != '_'))"
    assert python("-c", names).stdout.split() == dir(unitrain)


def test_help_comes_at_once() -> None:
    """In CPU time, the least of several tries, as below."""
    code = "import time, unitrain.commands.cli as cli\ntry: cli.main(['--help'])\nfinally: print(time.process_time())"
    seconds: list[float] = []
    while len(seconds) < 5 and min(seconds, default=1.0) > 0.3:
        seconds.append(float(python("-c", code).stdout.split()[-1]))
    assert min(seconds) <= 0.3


@pytest.mark.alone
def test_import_costs_little_over_torch() -> None:
    """At most a quarter of torch's CPU time, the least of several tries: a busy machine adds to both."""
    code = """
from time import process_time as now
began = now()
import torch
before = now()
from unitrain import *
print((now() - before) / (before - began))
"""
    ratios: list[float] = []
    while len(ratios) < 5 and min(ratios, default=1.0) > 0.25:
        ratios.append(float(python("-c", code).stdout))
    assert min(ratios) <= 0.25


def home_of(backend: str) -> Path:
    """Return the file of a backend: its only one, or the first of its folder."""
    folder = ROOT / "backends" / backend
    return folder / "backend.py" if folder.is_dir() else folder.with_suffix(".py")


def test_every_backend_has_an_entry_point() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    [section] = re.findall(rf'^\[project\.entry-points\."{GROUP}"\]\n(.+?)\n\n', text, re.MULTILINE | re.DOTALL)
    declared = dict(re.findall(r'^(\w+) = "(.+)"$', section, re.MULTILINE))
    assert {name: value.split(":")[0] for name, value in declared.items()} == {
        name: ".".join(["unitrain", *home_of(name).relative_to(ROOT).with_suffix("").parts]) for name in BUILT_IN
    }
    installed = {point.name: point.value for point in entry_points(group=GROUP)}
    lacking = sorted(set(declared.items()) - set(installed.items()))
    assert not lacking, f"run pip install -e . again: {lacking} came after the last time"
    assert set(backend_names()) >= set(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_backend_is_short_and_called_as_its_file(name: str) -> None:
    assert load_backend(name).name == name
    assert lines_of(home_of(name).read_text()).code <= 200


def sources(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def imported(tree: ast.Module) -> set[str]:
    """Return the modules that are imported anywhere in a file, by name or by ``import_module``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            names |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return names


def test_nobody_imports_a_backend() -> None:
    for path, tree in sources("unitrain", "recipes", "backends", "benchmarks"):
        bad = {name for name in imported(tree) if re.match(r"(unitrain\.)?backends\b", name)}
        assert not bad, f"{path} imports {bad}: name the backend, and let unitrain.communication.backend import it"


def test_only_its_backend_imports_horovod() -> None:
    # What checks or builds an installation does so in processes of their own.
    for path, tree in sources("unitrain", "recipes", "backends"):
        if path != Path("backends/horovod/backend.py"):
            bad = {name for name in imported(tree) if name.split(".")[0] == "horovod"}
            assert not bad, f"{path} imports {bad}"


def asks_for_a_backend(node: ast.AST) -> bool:
    """Whether a comparison, or a match, tells backends apart by their names."""
    if isinstance(node, ast.Compare):
        sides: list[ast.AST] = [node.left, *node.comparators]
    elif isinstance(node, ast.Match):
        sides = [node.subject, *(value for case in node.cases for value in ast.walk(case.pattern))]
    else:
        return False
    constants = {one.value for side in sides for one in ast.walk(side) if isinstance(one, ast.Constant)}
    asked = " ".join(ast.unparse(side) for side in sides if not isinstance(side, (ast.Constant, ast.pattern)))
    return bool(constants & set(BUILT_IN)) and bool(re.search(r"backend|strategy|\bname\b", asked))


def test_nothing_outside_backends_asks_which_backend_it_is() -> None:
    assert asks_for_a_backend(ast.parse("self.backend == 'ddp'").body[0].value)  # type: ignore[attr-defined]
    assert asks_for_a_backend(ast.parse("strategy.config.backend in ('ddp', 'single')").body[0].value)  # type: ignore[attr-defined]
    assert not asks_for_a_backend(ast.parse("config.backend == 'auto'").body[0].value)  # type: ignore[attr-defined]
    for path, tree in sources("unitrain", "recipes"):
        for node in ast.walk(tree):
            assert not asks_for_a_backend(node), f"{path}:{getattr(node, 'lineno', '')}: {ast.unparse(node)}"


def test_no_file_is_called_utils() -> None:
    vague = re.compile(r"(utils?|helpers?|misc|common)(\.py)?$")
    assert not [path for path, _ in sources("unitrain", "backends", "recipes", "tests") if vague.search(path.name)]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("nccl", "set backend to ddp and ddp.communication to nccl"),
        ("gloo", "set backend to ddp and ddp.communication to gloo"),
        ("mpi", "use the backend horovod"),
        ("dpd", "Did you mean 'ddp'?"),
    ],
)
def test_what_others_call_a_backend_is_explained(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        load_backend(name)


COLLECTIONS = """
import gc, sys, weakref
import torch, unitrain
during = []
gc.callbacks.append(lambda phase, info: during.append(info["generation"]))
unitrain.init
assert not during and gc.isenabled()
frozen = gc.get_freeze_count()
assert frozen > 100_000, frozen
class Cycle:
    def __init__(self):
        self.own = self
cycle = weakref.ref(Cycle())
unitrain.Meter  # imports more
assert gc.get_freeze_count() <= frozen
gc.collect()
assert cycle() is None
gc.disable()
unitrain.spawn
assert not gc.isenabled()
"""


def test_an_import_collects_no_garbage_and_leaves_torch_out_of_later_collections() -> None:
    subprocess.run([sys.executable, "-c", COLLECTIONS], check=True, timeout=60)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which this build of torch does not bring")
def test_what_is_left_out_of_collections_is_collected_at_the_end() -> None:
    """Triton's library prints which of its objects are left then. torch's compiler imports it."""
    code = "import torch._dynamo, triton._C.libtriton, unitrain; unitrain.init"
    assert python("-c", code).stderr == ""
