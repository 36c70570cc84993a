"""The recipe under every real launcher: training is the same, and a job fails as a whole."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jobs import RECIPE, Job, run_job
from places import TESTS
from slurm import Slurm, slurm_missing

pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("slurm")]

PYTHON = sys.executable
RAISES = TESTS / "programs" / "raises.py"
MPIRUN = ("mpirun", "--oversubscribe", "-np")
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node")
DEPRECATED = (PYTHON, "-m", "torch.distributed.launch", "--standalone", "--nproc-per-node")
VALIDATION = 360


class Start(NamedTuple):
    """A way to start a script, and what the recipe must say of it in its metrics."""

    command: tuple[str, ...]
    launcher: str
    backend: str
    world: int
    chosen: bool = False
    """Whether the backend has to be asked for."""


STARTS = {
    "python": Start((PYTHON,), "python", "single", 1),
    "torchrun": Start((*TORCHRUN, "2"), "torchrun", "ddp", 2),
    "torch.distributed.launch": Start((*DEPRECATED, "2"), "torchrun", "ddp", 2),
    "mpirun": Start((*MPIRUN, "2", PYTHON), "mpirun", "horovod", 2),
    "mpirun ddp": Start((*MPIRUN, "2", PYTHON), "mpirun", "ddp", 2, chosen=True),
    # Its MPI controller is mpirun, and can't be told from it.
    "horovodrun": Start(("horovodrun", "-np", "2", PYTHON), "mpirun", "horovod", 2),
    "horovodrun gloo": Start(("horovodrun", "--gloo", "-np", "2", PYTHON), "horovodrun", "horovod", 2),
    "srun": Start(("srun", "-n", "2", PYTHON), "srun", "ddp", 2),
    "torchrun 3": Start((*TORCHRUN, "3"), "torchrun", "ddp", 3),
    "horovodrun gloo 3": Start(("horovodrun", "--gloo", "-np", "3", PYTHON), "horovodrun", "horovod", 3),
    "horovodrun 8": Start(("horovodrun", "-np", "8", PYTHON), "mpirun", "horovod", 8),
}
MORE = ["torch.distributed.launch", "torchrun 3", "horovodrun gloo 3"]
PAIRS = ["torchrun", "mpirun", "mpirun ddp", "horovodrun", "horovodrun gloo", "srun"]


def missing(start: Start) -> str | None:
    """Return what keeps a way to start from being tried here, or None."""
    programs = {start.command[0]} & {"mpirun", "horovodrun"} | ({"mpirun"} if start.launcher == "mpirun" else set())
    path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
    if absent := [program for program in sorted(programs) if shutil.which(program, path=path) is None]:
        return f"{' and '.join(absent)} can't be found"
    if start.backend == "horovod" and find_spec("horovod") is None:
        return "Horovod is not installed: unitrain install-horovod"
    if start.launcher == "mpirun" and find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return slurm_missing() if start.launcher == "srun" else None


class Launchers:
    """Starts a script in any way of ``STARTS``, or skips the test where that can't be had."""

    def __init__(self, folder: Path, slurm_environ: dict[str, str]) -> None:
        self.folder = folder
        self._slurm_environ = slurm_environ

    def run(self, name: str, script: Path, flags: Sequence[str], deadline: float = 120) -> Job:
        start = STARTS[name]
        if reason := missing(start):
            pytest.skip(reason)
        environ = self._slurm_environ if start.launcher == "srun" else {}
        job = run_job([*start.command, str(script), *flags], self.folder, environ=environ, deadline=deadline)
        assert job.left == ()
        return job

    def train(self, name: str, flags: Sequence[str], deadline: float = 240) -> dict[str, Any]:
        """Run the recipe for an epoch or less, check what holds for any run, and return its metrics."""
        start = STARTS[name]
        chosen = ["--strategy.backend", start.backend] if start.chosen else []
        job = self.run(name, RECIPE, [*flags, *chosen, "--output-dir", "out", "--resume", "never"], deadline)
        assert job.code == 0, job.output
        assert [job.output.count(said) for said in ("learning rate 0.", "epoch 0: loss", "results are in")] == [1, 1, 1]
        (line,) = (self.folder / "out" / "metrics.jsonl").read_text().splitlines()
        metrics: dict[str, Any] = json.loads(line)
        assert (metrics["launcher"], metrics["backend"], metrics["world_size"]) == start[1:4]
        assert metrics["val_count"] == VALIDATION
        return metrics


@pytest.fixture(scope="module")
def slurm_environ(request: pytest.FixtureRequest) -> dict[str, str]:
    """What srun needs to find the tests' SLURM, started before the first test, where it can be."""
    if slurm_missing():
        return {}
    running: Slurm = request.getfixturevalue("slurm")
    return running.env


@pytest.fixture
def launchers(tmp_path: Path, slurm_environ: dict[str, str]) -> Launchers:
    return Launchers(tmp_path, slurm_environ)


class Parity:
    """Compares what a launcher's run measured with one process's, which runs once for each set of flags."""

    def __init__(self) -> None:
        self._alone: dict[tuple[str, ...], dict[str, Any]] = {}

    def check(self, launchers: Launchers, name: str, flags: tuple[str, ...], rel: float) -> None:
        if flags not in self._alone:
            self._alone[flags] = launchers.train("python", flags)
        alone, found = self._alone[flags], launchers.train(name, flags)
        for value in ("step", "train_loss", "val_loss", "val_accuracy", "learning_rate"):
            assert found[value] == pytest.approx(alone[value], rel=rel, abs=0), value


@pytest.fixture(scope="module")
def parity() -> Parity:
    return Parity()


@pytest.mark.parametrize(
    "name",
    [*PAIRS, *(pytest.param(name, marks=pytest.mark.soak) for name in MORE)],
)
def test_training_is_the_same_in_float64(launchers: Launchers, parity: Parity, name: str) -> None:
    flags = "--max-steps 8 --batch-size 50 --strategy.precision fp64 --strategy.sync-batchnorm true"
    parity.check(launchers, name, tuple(flags.split()), rel=1e-9)


@pytest.mark.soak
@pytest.mark.parametrize("name", PAIRS)
def test_training_is_the_same_in_float32(launchers: Launchers, parity: Parity, name: str) -> None:
    flags = "--max-steps 12 --lr 0.01 --lr-schedule constant --warmup-epochs 0 --strategy.sync-batchnorm true"
    parity.check(launchers, name, tuple(flags.split()), rel=1e-4)


@pytest.mark.soak
@pytest.mark.timeout(600)  # eight times torch and scikit-learn are imported on these cores
def test_eight_processes_on_few_cores(launchers: Launchers) -> None:
    assert launchers.train("horovodrun 8", ["--max-steps", "5"], deadline=550)["step"] == 5


def test_defaults_learn_the_digits(launchers: Launchers) -> None:
    job = launchers.run("torchrun", RECIPE, ["--output-dir", "out", "--resume", "never"])
    assert job.code == 0, job.output
    last = (launchers.folder / "out" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["val_accuracy"] >= 0.95


@pytest.mark.parametrize(("name", "backend"), [("mpirun", "single"), ("torchrun", "horovod")])
def test_a_world_that_the_backend_would_not_see_is_refused(launchers: Launchers, name: str, backend: str) -> None:
    job = launchers.run(name, RECIPE, ["--strategy.backend", backend])
    assert job.code != 0
    assert job.output.count(f"{name} started 2 processes, but with backend '{backend}'") == 1, job.output
    assert "Use backend auto" in job.output
    assert "epoch" not in job.output
    assert not (launchers.folder / "runs").exists()


@pytest.mark.parametrize("name", ["torchrun", "mpirun", "horovodrun gloo", "srun"])
def test_what_every_rank_finds_wrong_is_said_once(launchers: Launchers, name: str) -> None:
    job = launchers.run(name, RECIPE, ["--data", "imagefolder:nowhere"])
    assert job.code != 0
    assert job.output.count("unitrain: ") == job.output.count("data imagefolder:nowhere can't be used") == 1, job.output
    assert not (launchers.folder / "runs").exists()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.soak] * (n in ("horovodrun", "mpirun ddp"))) for n in PAIRS]
)
def test_a_rank_that_raises_ends_the_job(launchers: Launchers, name: str) -> None:
    raised = launchers.folder / "raised"
    job = launchers.run(name, RAISES, [str(raised), STARTS[name].backend])
    assert job.code != 0
    assert "unitrain: rank 1 of 2" in job.output, job.output
    assert "failed: RuntimeError: the disk is on fire" in job.output
    assert "trained to the end" not in job.output
    assert job.ended - float(raised.read_text()) < 60
