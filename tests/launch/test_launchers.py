"""Recipes under every real launcher: training is the same, and a job fails as a whole.

Each launcher is started once for most tests: ``programs/launched.py`` runs all of ``cases`` in one job, in processes
that are forked. In the soak, and where torchrun and mpirun end ranks that raise, they are interpreters of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jobs import Job, run_job
from places import ROOT, TESTS
from slurm import slurm_missing

pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("slurm")]

PYTHON = sys.executable
LAUNCHED = TESTS / "programs" / "launched.py"
RAISES = TESTS / "programs" / "raises.py"
MPIRUN = ("mpirun", "--oversubscribe", "-np")
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node")
DEPRECATED = (PYTHON, "-m", "torch.distributed.launch", "--standalone", "--nproc-per-node")
VALIDATION = 360


class Start(NamedTuple):
    """A way to start a script, and what the recipe must say of it in its metrics."""

    command: tuple[str, ...]
    launcher: str
    world: int
    backends: tuple[str, ...]
    """The one that is chosen for it, and others that work."""


STARTS = {
    "python": Start((PYTHON,), "python", 1, ("single",)),
    "torchrun": Start((*TORCHRUN, "2"), "torchrun", 2, ("ddp",)),
    "torch.distributed.launch": Start((*DEPRECATED, "2"), "torchrun", 2, ("ddp",)),
    "mpirun": Start((*MPIRUN, "2", PYTHON), "mpirun", 2, ("horovod", "ddp")),
    # Its MPI controller is mpirun, and can't be told from it.
    "horovodrun": Start(("horovodrun", "-np", "2", PYTHON), "mpirun", 2, ("horovod",)),
    "horovodrun gloo": Start(("horovodrun", "--gloo", "-np", "2", PYTHON), "horovodrun", 2, ("horovod",)),
    "srun": Start(("srun", "-n", "2", PYTHON), "srun", 2, ("ddp",)),
    "torchrun 3": Start((*TORCHRUN, "3"), "torchrun", 3, ("ddp",)),
    "horovodrun gloo 3": Start(("horovodrun", "--gloo", "-np", "3", PYTHON), "horovodrun", 3, ("horovod",)),
}
QUICK = ["torchrun", "mpirun", "horovodrun gloo", "srun"]
# Has Horovod start MPI, and that can be done once, so it is not made to fail.
LATER = pytest.mark.all("horovodrun that starts mpirun")
SHARED = pytest.mark.all("ranks that share batches, under launchers beyond torchrun")
BY_MPI = pytest.param("horovodrun", marks=LATER)
MORE = ["torch.distributed.launch", "torchrun 3", "horovodrun gloo 3"]
FLOAT64 = "--max-steps 8 --batch-size 50 --strategy.precision fp64 --strategy.sync-batchnorm true"
TEXT = (
    f"--data={ROOT}/README.md --context=64 --layers=1 --width=16 --heads=2 --batch-size=7 --max-steps=6 --sample=9 "
    "--strategy.precision=fp64 --strategy.ranks-per-batch="
)
PPO = "--environments 4 --steps 64 --batch-size 51 --rounds 2 --epochs 2 --strategy.precision fp64"


def trainings(start: Start, flags: str) -> dict[str, str]:
    """Return the flags of a training on each backend, by its name."""
    chosen, *others = start.backends
    return {chosen: flags} | {backend: f"{flags} --strategy.backend {backend}" for backend in others}


def cases(name: str) -> dict[str, str]:
    """Return what all tests want of one start, by the names of the cases. "nowhere" ends the job."""
    trained = {**trainings(STARTS[name], FLOAT64), "ppo": PPO}
    return trained | ({"nowhere": "--data imagefolder:nowhere"} if name in QUICK else {})


def missing(start: Start) -> str | None:
    """Return what keeps a way to start from being tried here, or None."""
    programs = {start.command[0]} & {"mpirun", "horovodrun"} | ({"mpirun"} if start.launcher == "mpirun" else set())
    path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
    if absent := [program for program in sorted(programs) if shutil.which(program, path=path) is None]:
        return f"{' and '.join(absent)} can't be found"
    if "horovod" in start.backends and find_spec("horovod") is None:
        return "Horovod is not installed: unitrain install-horovod"
    if start.launcher == "mpirun" and find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return slurm_missing() if start.launcher == "srun" else None


class Launched(NamedTuple):
    """A job that has ended, and its folder."""

    job: Job
    folder: Path

    def metrics(self, case: str) -> list[dict[str, Any]]:
        """Return the metrics of each epoch that the recipe has trained in a case."""
        file = self.folder / case / "metrics.jsonl"
        assert file.exists(), self.job.output
        return [json.loads(line) for line in file.read_text().splitlines()]


class Launchers:
    """Starts jobs in any way of ``STARTS``, or skips the test where that can't be had."""

    def __init__(self, folders: pytest.TempPathFactory, slurm_environ: dict[str, str]) -> None:
        self._folders = folders
        self._slurm_environ = slurm_environ
        self._with_cases: dict[str, Launched] = {}

    def run(self, name: str, script: Path, *arguments: str, deadline: float = 240) -> Launched:
        """Start a script, and return how it ended."""
        start = STARTS[name]
        if reason := missing(start):
            pytest.skip(reason)
        environ = self._slurm_environ if start.launcher == "srun" else {}
        folder = self._folders.mktemp("launched")
        command = [sys.executable if word == PYTHON else word for word in start.command]  # which may be forked
        job = run_job([*command, str(script), *arguments], folder, environ=environ, deadline=deadline)
        assert job.left == ()
        return Launched(job, folder)

    def train(self, name: str, wanted: Mapping[str, str], deadline: float = 240) -> Launched:
        """Run the recipe with the flags of these cases, one after another in one job."""
        return self.run(name, LAUNCHED, json.dumps(wanted), deadline=deadline)

    def with_cases(self, name: str) -> Launched:
        """Return the job that has run ``cases``, started for the first test that asks for it."""
        if name not in self._with_cases:
            self._with_cases[name] = self.train(name, cases(name))
        return self._with_cases[name]


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory, slurm_environ: dict[str, str]) -> Launchers:
    return Launchers(tmp_path_factory, slurm_environ)


def assert_as_alone(launched: Launched, name: str, backend: str, alone: Launched, rel: float) -> None:
    """Assert that a launcher's run has measured what one process has."""
    start = STARTS[name]
    [found], [expected] = launched.metrics(backend), alone.metrics("single")
    assert (found["launcher"], found["backend"], found["world_size"]) == (start.launcher, backend, start.world)
    assert found["val_count"] == expected["val_count"] == VALIDATION
    for value in ("step", "train_loss", "val_loss", "val_accuracy", "learning_rate"):
        assert found[value] == pytest.approx(expected[value], rel=rel, abs=0), value


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=marks)
        for names, marks in ((QUICK, ()), (["horovodrun"], LATER), (MORE, pytest.mark.soak))
        for name in names
        for backend in STARTS[name].backends
    ],
)
def test_training_is_the_same_in_float64(launchers: Launchers, name: str, backend: str) -> None:
    assert_as_alone(launchers.with_cases(name), name, backend, launchers.with_cases("python"), rel=1e-9)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", [*QUICK, BY_MPI])
def test_reinforcement_learning_is_the_same_in_float64(launchers: Launchers, name: str) -> None:
    lines, expected = (launchers.with_cases(start).metrics("ppo") for start in (name, "python"))
    assert [line["launcher"] for line in lines] == [STARTS[name].launcher] * 2
    for value in ("step", "mean_return", "policy_loss", "value_loss", "entropy"):
        assert [line[value] for line in lines] == pytest.approx([line[value] for line in expected], rel=1e-9), value


@pytest.fixture(scope="module")
def text_alone(launchers: Launchers) -> dict[str, Any]:
    """Return what one process measures of the language model."""
    return launchers.train("python", {"language_model": f"{TEXT}1"}).metrics("language_model")[0]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "name",
    [
        "torchrun",
        *(pytest.param(name, marks=SHARED) for name in [*QUICK[1:], "horovodrun"]),
        pytest.param("torchrun 3", marks=pytest.mark.soak),
    ],
)
def test_ranks_that_share_each_text_train_the_model_of_one_process(
    launchers: Launchers, text_alone: dict[str, Any], name: str
) -> None:
    flags = f"{TEXT}{STARTS[name].world}"
    [found] = launchers.train(name, {"language_model": flags}).metrics("language_model")
    assert (found["launcher"], found["world_size"]) == (STARTS[name].launcher, STARTS[name].world)
    for value in ("step", "train_perplexity", "val_perplexity", "val_tokens"):
        assert found[value] == pytest.approx(text_alone[value], rel=1e-9), value


@pytest.mark.soak
def test_defaults_learn_the_digits(launchers: Launchers) -> None:
    assert launchers.train("torchrun", {"defaults": ""}).metrics("defaults")[-1]["val_accuracy"] >= 0.97


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", QUICK)
def test_what_every_rank_finds_wrong_is_said_once(launchers: Launchers, name: str) -> None:
    job, folder = launchers.with_cases(name)
    assert job.code != 0
    assert job.output.count("unitrain: ") == job.output.count("data imagefolder:nowhere can't be used") == 1, job.output
    assert not (folder / "nowhere").exists()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", [*QUICK, BY_MPI])
def test_what_rank_0_prints_is_printed_once(launchers: Launchers, name: str) -> None:
    job, folder = launchers.with_cases(name)
    trained = len(list(folder.glob("*/metrics.jsonl")))
    assert trained == len(set(cases(name)) - {"nowhere"})
    for said, times in (("learning rate 0.", trained - 1), ("epoch 0: loss", trained - 1), ("results are in", trained)):
        assert job.output.count(said) == times, job.output  # the PPO recipe says other things


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("torchrun", "ddp", marks=pytest.mark.all("test_ends.py has an error of a rank of ddp")),
        ("mpirun", "horovod"),
        ("horovodrun gloo", "horovod"),
        ("srun", "ddp"),
        pytest.param("mpirun", "ddp", marks=pytest.mark.soak),
        pytest.param("horovodrun", "horovod", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_raises_ends_the_job(
    launchers: Launchers, tmp_path: Path, request: pytest.FixtureRequest, name: str, backend: str
) -> None:
    if name in ("horovodrun gloo", "srun"):
        request.getfixturevalue("forked")
    job, _ = launchers.run(name, RAISES, str(tmp_path / "raised"), backend)
    assert job.code != 0
    assert "unitrain: rank 1 of 2" in job.output, job.output
    assert "failed: RuntimeError: the disk is on fire" in job.output
    assert "came to the end" not in job.output
    assert job.ended - float((tmp_path / "raised").read_text()) < 60
