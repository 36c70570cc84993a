"""``unitrain verify`` passes on every installed backend, and it can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import FSDP, GPU
from places import TESTS

from unitrain.commands.verify import command, worlds
from unitrain.commands.verify.command import verify
from unitrain.commands.verify.worlds import World, find_worlds, works
from unitrain.communication.backend import backend_names
from unitrain.errors import UsageError
from unitrain.launch.local.launchers import launch_environment
from unitrain.testing.parity.cases import CASES


def run_verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unitrain.commands.cli", "verify", *arguments],
        env=launch_environment(),
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )


@pytest.fixture
def three_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``verify`` train three cases. test_conformance.py trains all, in worlds that cost less."""
    monkeypatch.setattr(command, "CASES", [case for case in CASES if case.name in ("plain", "sync_batchnorm", "bf16")])


@pytest.mark.launcher
@pytest.mark.usefixtures("forked")
@pytest.mark.timeout(600)
def test_a_backend_trains_as_the_plain_loop_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, three_cases: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for launcher in worlds._SIZES:
        monkeypatch.setitem(worlds._SIZES, launcher, {"torchrun": (3,), "mpirun": (2,)}.get(launcher, ()))
    output = tmp_path / "verdicts.json"
    assert verify(backend="ddp", output=output) == 0, capsys.readouterr().out
    assert "6 of 6 trained the same as the plain loop" in capsys.readouterr().out
    assert_same(json.loads(output.read_text()), {"torchrun x3", "mpirun x2"}, 3)


def test_an_output_that_cant_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/x\.json can't be written: .* Correct that"):
        verify(backend="single", output=tmp_path / "file" / "x.json")


@pytest.mark.soak
@pytest.mark.launcher
@pytest.mark.timeout(600)
def test_all_backends_train_as_the_plain_loop_does(tmp_path: Path) -> None:
    output = tmp_path / "verdicts.json"
    done = run_verify("--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads(output.read_text())
    assert len(verdicts) == len(CASES) * len(find_worlds(backend_names()))
    expected = {
        "ddp": {"torchrun x2", "torchrun x3", "mpirun x3"},
        "fsdp": {"torchrun x2", "torchrun x3", "mpirun x3"},
        "horovod": {"mpirun x2", "mpirun x3", "horovodrun x2"},
    }
    for name in {v["backend"] for v in verdicts}:
        assert_same([v for v in verdicts if v["backend"] == name], expected.get(name, {"python x1"}), len(CASES))


def assert_same(verdicts: list[dict[str, Any]], expected: set[str], cases: int) -> None:
    """Assert that the verdicts on a backend are good, and on these worlds, among others."""
    tried = {v["world"] for v in verdicts}
    assert expected <= tried
    assert len(verdicts) == cases * len(tried)
    exact = [v for v in verdicts if v["tolerance"] == 1e-9]
    assert exact
    assert max(max(v["loss"], v["gradient"], v["weight"]) for v in exact) < 1e-9


@pytest.mark.launcher
@pytest.mark.usefixtures("forked")
def test_a_backend_that_trains_another_model_is_found_out(
    three_cases: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = TESTS / "plugin"
    for folder in (plugin, plugin / "wrong"):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{plugin}:{plugin / 'wrong'}")
    assert verify(backend="drops_a_rank_of_gradients") == 1
    assert "plain: loss" in " ".join(capsys.readouterr().out.split())


RECIPE = """
import json
import os
import sys

import unitrain
from unitrain.config import Section


class Settings(Section):
    max_steps: int = 1
    output_dir: str = "out"
    error: float = 0.0
    strategy: unitrain.StrategyConfig = unitrain.StrategyConfig()


settings = unitrain.parse_command_line(Settings, sys.argv[1:], prog="tiny.py", description="Train.")
with unitrain.init(settings.strategy) as strategy:
    if strategy.is_main:
        os.mkdir(settings.output_dir)
        row = {"step": settings.max_steps, "train_loss": 2.0 + settings.error * (strategy.world_size - 1)}
        with open(f"{settings.output_dir}/metrics.jsonl", "w") as file:
            file.write(json.dumps({**row, "val_loss": 1.0, "val_accuracy": 1.0, "val_count": 8}))
"""


@pytest.mark.launcher
@pytest.mark.usefixtures("forked")
def test_a_recipe_is_compared_by_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for launcher in worlds._SIZES:
        monkeypatch.setitem(worlds._SIZES, launcher, (2,) if launcher == "torchrun" else ())
    recipe = tmp_path / "tiny.py"
    recipe.write_text(RECIPE)
    assert verify(backend="ddp", script=recipe) == 0
    assert "1 of 1 trained the same as one process" in capsys.readouterr().out
    assert verify(backend="ddp", script=recipe, flags=["--error", "0.002"]) == 1
    assert "train_loss deviates by 1.0e-03" in " ".join(capsys.readouterr().out.split())


def test_what_a_backend_refuses_is_left_out() -> None:
    world = World("torchrun", 2, "ddp")
    assert works(world, "cpu", {"compile": True})
    assert not works(world, "cpu", {"compile": True, "ddp": {"bucket_cap_mb": 0.5}})


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("backend", ["single", "data_parallel", "ddp", pytest.param("fsdp", marks=FSDP)])
def test_backends_pass_on_a_gpu_that_the_ranks_share(backend: str) -> None:
    assert verify(backend=backend, device="cuda:0") == 0


@pytest.mark.gpu
@GPU
@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA GPUs, and pytest -m gpu to see them")
def test_backends_pass_on_gpus_of_their_own() -> None:
    assert verify(device="cuda") == 0
