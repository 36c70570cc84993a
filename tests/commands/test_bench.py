"""``unitrain bench`` with a tiny recipe in real worlds, its records, and its arithmetic on made-up records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import run_job

from unitrain import StrategyConfig
from unitrain.commands.bench.candidates import LEVERS, Candidate, levers_of
from unitrain.commands.bench.command import Tuning, bench, efficiency, recommendation
from unitrain.commands.bench.measuring import Measurement, evaluate, measure
from unitrain.commands.verify.worlds import World
from unitrain.config import Section
from unitrain.errors import UsageError
from unitrain.metrics.throughput import Totals
from unitrain.settings import parse_command_line

RECIPE = """
import sys
import torch
import unitrain
from unitrain.config import Section
from unitrain.settings import parse_command_line


class Settings(Section):
    epochs: int = 50
    output_dir: str = "out"
    strategy: unitrain.StrategyConfig = unitrain.StrategyConfig()


settings = parse_command_line(Settings, sys.argv[1:], prog="tiny.py", description="Train.")
with unitrain.init(settings.strategy) as strategy:
    if strategy.launch.launcher == "mpirun":
        raise RuntimeError("this recipe dislikes mpirun")
    model = torch.nn.Linear(4, 1)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = strategy.dataloader(torch.utils.data.TensorDataset(torch.ones(40, 4)), global_batch_size=8)
    for epoch in loader.epochs(settings.epochs):
        for (inputs,) in loader:
            strategy.step(model(inputs).square().mean(), optimizer)
"""


class Recommended(Section):
    """What every recipe can be given."""

    strategy: StrategyConfig = StrategyConfig()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(RECIPE)
    return path


# ----------------------------------------------------------------------------------------------------- real processes


@pytest.mark.launcher
def test_every_world_is_measured_and_what_is_recommended_can_be_used(recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    command = [sys.executable, "-m", "unitrain.commands.cli", "bench", "--backend", "horovod", "--processes", "2"]
    job = run_job([*command, "--steps", "9", "--levers", "none", str(recipe), "--", "--epochs", "9"], tmp_path)
    assert job.code == 0, job.output
    alone, mpirun, horovodrun = json.loads((tmp_path / "bench" / "results.json").read_text())
    for row, where in (
        (alone, ("python", 1, "single")),
        (mpirun, ("mpirun", 2, "horovod")),
        (horovodrun, ("horovodrun", 2, "horovod")),
    ):
        assert (row["launcher"], row["processes"], row["backend"]) == where
    for row in (alone, horovodrun):
        assert row["problem"] == ""
        assert row["samples_per_second"] == pytest.approx(8 / row["step_seconds"])
        assert sum(row["split"].values()) == pytest.approx(row["step_seconds"])
    assert alone["split"]["idle"] == 0
    assert horovodrun["split"]["step"] > 0.0005  # it waits for Horovod's cycle, of 1 ms
    assert "RuntimeError: this recipe dislikes mpirun" in mpirun["problem"]
    assert "RuntimeError: this recipe dislikes mpirun" in " ".join(job.stdout.split())
    recommended = tmp_path / "bench" / "recommended.yaml"
    read = parse_command_line(Recommended, ["--config", str(recommended)], prog="tiny.py", description="Train.")
    fastest = max((alone, horovodrun), key=lambda row: row["samples_per_second"])
    assert read.strategy.backend == fastest["backend"]


@pytest.mark.launcher
def test_a_lever_reaches_the_run(recipe: Path) -> None:
    candidate = Candidate(World("torchrun", 2, "ddp")).with_setting("ddp.static_graph", True)
    found = measure(candidate, recipe, (), steps=9)
    assert found.problem == ""
    assert found.samples_per_second > 0


def test_a_recipe_that_fails_alone_is_one_message(recipe: Path) -> None:
    with pytest.raises(UsageError, match=r"In one process: exit code 2: .*--epoks is not a flag"):
        bench(recipe, flags=["--epoks", "3"], processes=1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--epochs", "1"), "the recipe made only 5 of 9 steps"),
        (("--strategy.threads-per-process", "1"), "the recipe's flags or code set threads_per_process to 1"),
    ],
)
def test_a_run_that_is_not_the_candidate_s_is_none(recipe: Path, flags: tuple[str, ...], said: str) -> None:
    candidate = Candidate(World("python", 1, "single"), (("threads_per_process", 2),))
    assert said in measure(candidate, recipe, flags, steps=9).problem


# --------------------------------------------------------------------------------------------------------- arithmetic


def totals(data: float, forward: float, step: float) -> list[Totals]:
    """Return what a rank records of 4 samples a step, in steps of equal length."""
    return [Totals(4 * i, (data + forward + step) * i, data * i, step * i) for i in range(7)]


def test_a_step_is_split_by_what_precedes_it_on_each_rank() -> None:
    candidate = Candidate(World("torchrun", 2, "ddp"))
    found = evaluate(candidate, [totals(0.01, 0.03, 0.06), totals(0.03, 0.05, 0.02)])
    assert found.samples_per_second == pytest.approx(80)
    assert (found.step_seconds, found.spread) == pytest.approx((0.1, 0.0))
    # They begin their steps after 40 and 80 ms: one waits for 40 in its step, which is 20 on the mean.
    assert found.split == pytest.approx((0.02, 0.04, 0.02, 0.02))
    alone = evaluate(Candidate(World("python", 1, "single")), [totals(0.01, 0.03, 0.04)])
    assert alone.split == pytest.approx((0.01, 0.03, 0.04, 0))
    assert efficiency(found, alone) == pytest.approx(80 / (2 * 50))


def test_levers_are_those_that_do_something_in_a_world() -> None:
    names = {name for name, _ in levers_of(World("mpirun", 2, "horovod"), list(LEVERS))}
    assert names == {"horovod.cycle_time_ms", "horovod.fusion_threshold_mb", "threads_per_process"}
    assert {name for name, _ in levers_of(World("python", 1, "single"), list(LEVERS))} == {"threads_per_process"}


def test_a_candidate_is_variables_that_a_recipe_reads() -> None:
    candidate = Candidate(World("torchrun", 2, "ddp")).with_setting("ddp.static_graph", True)
    candidate = candidate.with_setting("ddp.bucket_cap_mb", 1.0).with_setting("ddp.bucket_cap_mb", 100.0)
    assert candidate.variables() == {
        "UNITRAIN_BACKEND": "ddp",
        "UNITRAIN_DDP__STATIC_GRAPH": "true",
        "UNITRAIN_DDP__BUCKET_CAP_MB": "100.0",
    }


def test_a_recommendation_holds_the_settings_and_how_to_start_them(tmp_path: Path) -> None:
    candidate = Candidate(World("torchrun", 2, "ddp")).with_setting("threads_per_process", 2)
    best = Measurement(candidate.with_setting("ddp.bucket_cap_mb", 1.0), 1234.5)
    file = tmp_path / "recommended.yaml"
    file.write_text(recommendation(best, Path("train.py"), ["--model", "a b"], file))
    read = parse_command_line(Recommended, ["--config", str(file)], prog="train.py", description="Train.")
    assert read.strategy == StrategyConfig(backend="ddp", threads_per_process=2, ddp={"bucket_cap_mb": 1.0})
    said = file.read_text()
    assert "torchrun --standalone --nproc-per-node 2 train.py --model 'a b' --config" in said
    assert "UNITRAIN_BACKEND=ddp UNITRAIN_THREADS_PER_PROCESS=2 UNITRAIN_DDP__BUCKET_CAP_MB=1.0" in said


def test_a_lever_is_kept_only_where_it_helps_twice() -> None:
    base = Candidate(World("torchrun", 2, "ddp"))
    small = base.with_setting("ddp.bucket_cap_mb", 1.0)
    speeds = {
        base: [110.0],  # after 100 the first time
        base.with_setting("ddp.static_graph", True): [120.0, 105.0],  # once by luck
        small: [130.0, 125.0],
        small.with_setting("ddp.bucket_cap_mb", 100.0): [90.0],
    }
    speeds[base].append(100.0)

    def measured(candidate: Candidate) -> Measurement:
        return Measurement(candidate, speeds[candidate].pop(0))

    tuning = Tuning(Measurement(base, 100.0), ["ddp.static_graph", "ddp.bucket_cap_mb"], measured)
    assert [found.samples_per_second for found in tuning] == [120.0, 130.0, 90.0]
    assert tuning.best == Measurement(small, 125.0)
    assert not any(speeds.values())


# ------------------------------------------------------------------------------------------------------ what it refuses


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 5}, "--steps is 5, but must be at least 6"),
        ({"processes": 0}, "--processes is 0"),
        ({"levers": ["bucket"]}, "'bucket' can't be tuned; choose from ddp.static_graph, "),
    ],
)
def test_a_wrong_argument_is_one_message(recipe: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bench(recipe, **settings)


def test_a_target_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a file"):
        bench(tmp_path / "nowhere.py")
