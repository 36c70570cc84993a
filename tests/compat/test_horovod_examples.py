"""Scripts like Horovod's examples run unchanged by ``unitrain horovod``, under every launcher: the same weights."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from jobs import run_job
from needs import HOROVOD
from places import TESTS
from ranks import run_ranks
from slurm import slurm_missing

EXAMPLES = TESTS / "compat" / "examples"
FLAGS = {"mnist": ("--gradient-predivide-factor", "2.0"), "imagenet": ("--batches-per-allreduce", "2")}
OURS = ("unitrain", "horovod")
STARTS: dict[str, tuple[str, ...]] = {
    "python": OURS,
    "torchrun": ("torchrun", "--standalone", "--no-python", "--nproc-per-node", "2", *OURS),
    "mpirun": ("mpirun", "--oversubscribe", "-np", "2", *OURS),
    "horovodrun": ("horovodrun", "--gloo", "-np", "2", *OURS),
    "srun": ("srun", "-n", "2", *OURS),
    "real": ("horovodrun", "--gloo", "-np", "2", sys.executable),
}
OTHER = pytest.mark.all("another launcher, or another script")

pytestmark = [HOROVOD, pytest.mark.launcher, pytest.mark.xdist_group("slurm")]


def script(name: str, *flags: str) -> None:
    """Run an example with real Horovod on this rank, and write its result into the current folder."""
    path = str(EXAMPLES / f"{name}.py")
    sys.argv[:] = [path, *flags]
    runpy.run_path(path, run_name="__main__")


def assert_same_result(name: str, folder: Path, nprocs: int, *flags: str) -> None:
    """Run an example with real Horovod in this folder, and assert that another has the same result."""
    run_ranks(script, name, *flags, nprocs=nprocs, launcher="horovodrun")
    ours, theirs = (torch.load(place / f"{name}.pt") for place in (folder, Path()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("start", "name"),
    [
        ("torchrun", "mnist"),
        *(pytest.param("torchrun", name, marks=OTHER) for name in ("synthetic", "imagenet", "elastic_mnist")),
        *(pytest.param(start, "mnist", marks=OTHER) for start in ("python", "mpirun", "horovodrun", "srun", "real")),
    ],
)
def test_an_example_trains_the_weights_of_horovod(
    start: str,
    name: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    slurm_environ: dict[str, str],
) -> None:
    if start == "srun" and (reason := slurm_missing()):
        pytest.skip(reason)
    if start == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("mpirun can't be found")
    flags = FLAGS.get(name, ())
    command = [sys.executable if word == STARTS["real"][-1] else word for word in STARTS[start]]
    environ = slurm_environ if start == "srun" else {}
    job = run_job([*command, str(EXAMPLES / f"{name}.py"), *flags], tmp_path, environ=environ)
    assert (job.code, job.left) == (0, ()), job.output
    monkeypatch.chdir(tmp_path_factory.mktemp("horovod"))
    assert_same_result(name, tmp_path, 1 if start == "python" else 2, *flags)


@OTHER
def test_what_an_elastic_script_has_committed_survives_a_restart(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["unitrain", "run", "--max-restarts", "1", "--", *STARTS["torchrun"], str(EXAMPLES / "elastic_mnist.py")]
    environ = {"UNITRAIN_ELASTIC_FOLDER": "committed"}
    job = run_job([*command, "--lose-a-rank"], tmp_path, environ=environ)
    assert (job.code, job.left) == (0, ()), job.output
    assert (tmp_path / "lost").exists()
    monkeypatch.chdir(tmp_path_factory.mktemp("horovod"))
    assert_same_result("elastic_mnist", tmp_path, 2)
