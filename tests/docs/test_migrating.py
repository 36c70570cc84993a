"""The page on migrating: the scripts before and after train the same network, on one process and on two."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  (so that run_ranks has the ranks forked with it)
import torch
from needs import HOROVOD
from places import ROOT
from ranks import run_ranks

SCRIPTS = ROOT / "docs" / "migrating" / "scripts"
# What torchrun sets, by which Fabric and Ignite know it.
TORCHRUN = {"TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": "0"}
EPOCHS = 3


def train(script: str, folder: str, environ: dict[str, str]) -> str:
    """Run a script in float64, and return what it prints.

    Every library has a random order of its own, so the data are taken as they come.
    """
    os.chdir(folder)
    os.environ.update(environ, UNITRAIN_PRECISION="fp64")
    sys.path.insert(0, str(SCRIPTS))
    torch.set_default_dtype(torch.float64)
    source = (SCRIPTS / script).read_text(encoding="utf-8").replace("shuffle=True", "shuffle=False")
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, script, "exec", dont_inherit=True), {"__name__": "__main__"})
    return printed.getvalue()


def curve(
    script: str, folder: Path, nprocs: int, launcher: str = "spawn", environ: dict[str, str] | None = None
) -> list[list[float]]:
    """Return epoch, loss and accuracy of each epoch, which rank 0 alone prints, and check the saved weights."""
    printed = run_ranks(train, script, str(folder), environ or {}, nprocs=nprocs, launcher=launcher)  # type: ignore[arg-type]
    lines = [[float(word) for word in line.split()] for line in printed[0].splitlines()]
    assert [line[0] for line in lines] == list(range(EPOCHS))
    assert not any(printed[1:])
    saved = torch.load(folder / "model.pt", weights_only=True)
    assert set(saved.get("model", saved)) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    return lines


@pytest.fixture(scope="module")
def on_unitrain(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    lines = curve("on_unitrain.py", tmp_path_factory.mktemp("on_unitrain"), 1)
    assert lines[-1][2] > 0.7  # by chance: 0.1
    return lines


def environment(script: str, nprocs: int) -> tuple[str, dict[str, str]]:
    """Return how a script's processes are started, and with which variables."""
    if script.startswith("horovod"):
        return "horovodrun", {}
    if script.startswith("fabric"):  # as fabric run sets them
        return "spawn", {"LT_ACCELERATOR": "cpu", "LT_DEVICES": str(nprocs), "LT_STRATEGY": "ddp", **TORCHRUN}
    if script.startswith("accelerate"):  # as accelerate launch sets them; it warns where nobody sets the threads
        return "spawn", {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return "spawn", TORCHRUN if script.startswith("ignite_before") else {}


ANOTHER = pytest.mark.all("starts another framework")


@pytest.mark.xdist_group("migrating")
@pytest.mark.parametrize(
    ("script", "nprocs"),
    [
        ("on_unitrain.py", 2),
        ("plain_before.py", 1),
        ("data_parallel_before.py", 1),
        ("ddp_before.py", 2),
        pytest.param("horovod_before.py", 2, marks=HOROVOD),
        pytest.param("accelerate_before.py", 2, marks=ANOTHER),
        pytest.param("fabric_before.py", 2, marks=ANOTHER),
        pytest.param("ignite_before.py", 2, marks=ANOTHER),
        ("ignite_engine_on_unitrain.py", 2),
    ],
)
def test_the_same_losses(script: str, nprocs: int, on_unitrain: list[list[float]], tmp_path: Path) -> None:
    launcher, environ = environment(script, nprocs)
    found = curve(script, tmp_path, nprocs, launcher, environ)
    assert all(
        line == pytest.approx(expected, rel=0, abs=1e-9) for line, expected in zip(found, on_unitrain, strict=True)
    )


def test_every_script_is_tested_and_linked() -> None:
    [mark] = [mark for mark in test_the_same_losses.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    tested = {getattr(case, "values", case)[0] for case in mark.args[1]}
    assert tested == {path.name for path in SCRIPTS.glob("*.py")} - {"digits.py"}
    page = (SCRIPTS.parent / "moving.md").read_text(encoding="utf-8")
    assert tested == set(re.findall(r"\(scripts/(\w+\.py)\)", page))
