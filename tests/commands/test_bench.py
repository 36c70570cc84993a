"""``unitrain bench`` with a tiny recipe in real worlds, and its arithmetic on made-up records."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import run_job
from rich.console import Console

from unitrain.commands.bench import Measurement, bench, evaluate, measure, print_table
from unitrain.commands.verify.worlds import World
from unitrain.errors import UsageError

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


pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(RECIPE)
    return path


# ----------------------------------------------------------------------------------------------------- real processes


@pytest.mark.launcher
def test_every_world_is_measured(recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    command = [sys.executable, "-m", "unitrain.commands.cli", "bench", "--backend", "horovod", "--processes", "2"]
    job = run_job([*command, "--steps", "9", "--output", "out.json", str(recipe), "--", "--epochs", "9"], tmp_path)
    assert job.code == 0, job.output
    alone, mpirun, horovodrun = json.loads((tmp_path / "out.json").read_text())
    for row, where in (
        (alone, ("python", 1, "single")),
        (mpirun, ("mpirun", 2, "horovod")),
        (horovodrun, ("horovodrun", 2, "horovod")),
    ):
        assert row["world"] == dict(zip(("launcher", "size", "backend"), where, strict=True))
    for row in (alone, horovodrun):
        assert row["problem"] == ""
        seconds = row["data"] + row["forward"] + row["step"]
        assert 0.1 < row["samples_per_second"] * seconds / 8 < 10, "a mean and a median, of a machine that may be busy"
        assert row["memory_mb"] > 50
    assert horovodrun["step"] > 0.0005  # it waits for Horovod's cycle, of 1 ms
    assert "RuntimeError: this recipe dislikes mpirun" in mpirun["problem"]
    assert "RuntimeError: this recipe dislikes mpirun" in " ".join(job.stdout.split())
    assert "fastest: " in job.stdout


def test_a_recipe_that_fails_alone_is_one_message(recipe: Path) -> None:
    with pytest.raises(UsageError, match=r"In one process: exit code 2: .*--epoks is not a flag"):
        bench(recipe, flags=["--epoks", "3"], processes=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--epochs", "1"), "the recipe ended before step 9 of a strategy"),
        (("--strategy.backend", "data_parallel"), "the recipe's flags or code set backend to data_parallel"),
    ],
)
def test_a_run_that_is_not_the_measured_one_has_a_problem(recipe: Path, flags: tuple[str, ...], message: str) -> None:
    assert message in measure(World("python", 1, "single"), recipe, flags, steps=9).problem


# --------------------------------------------------------------------------------------------------------- arithmetic


def throughput(samples_per_second: float, data: float) -> dict[str, float]:
    """Return what ``Throughput.read`` returns for two steps."""
    return {
        "samples_per_second": samples_per_second,
        "data_seconds": data,
        "rest_seconds": 0.02,
        "step_seconds": 0.08,
        "peak_memory_mb": samples_per_second,
    }


def test_the_measured_thirds_are_averaged() -> None:
    world = World("torchrun", 2, "ddp")
    found = evaluate(world, [throughput(60.0, 0.1), throughput(100.0, 0.3)], steps=6)
    assert (found.samples_per_second, found.spread, found.memory_mb) == (80.0, 0.25, 100.0)
    assert (found.data, found.forward, found.step) == pytest.approx((0.1, 0.01, 0.04))
    console = Console(record=True, width=120)
    print_table([Measurement(World("python", 1, "single"), 50.0), found], console)
    assert re.search(r"torchrun x2 ddp +80 +25% +80% ", console.export_text())  # 80 of the 2 * 50 samples


def test_a_loop_over_another_loader_has_a_problem() -> None:
    found = evaluate(World("python", 1, "single"), [throughput(0.0, 0.0)] * 2, steps=6)
    assert found.problem == "the training loop does not iterate over strategy.dataloader"


# ------------------------------------------------------------------------------------------------------ what it refuses


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"steps": 5}, "--steps is 5, but must be at least 6"), ({"processes": 0}, "--processes is 0")],
)
def test_a_wrong_argument_is_one_message(recipe: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench(recipe, **settings)


def test_a_target_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a file"):
        bench(tmp_path / "nowhere.py")
