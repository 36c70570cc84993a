"""The benchmarks run, in a short form, so that they can't rot. What they measure here is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unitrain.launching.commands import launch_command, launch_environment

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("launcher", "world"), [("python", 1), ("torchrun", 2), ("horovodrun", 2)])
def test_step_overhead(launcher: str, world: int, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    script = str(ROOT / "benchmarks" / "step_overhead.py")
    command = launch_command(launcher, world, [script, "--rounds", "2", "--steps", "5", "--output", str(output)])
    done = subprocess.run(command, env=launch_environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(output.read_text())
    assert (figures["launcher"], figures["world_size"]) == (launcher, world)
    assert figures["weights_bit_equal"], "the loop by hand and ours must train the same model"
    assert figures["unitrain_us"] > 0


def test_sampler(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "sampler.py")
    command = [sys.executable, script, "--sizes", "100000", "--rounds", "1", "--output", str(tmp_path)]
    done = subprocess.run(command, env=launch_environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "sampler.json").read_text())
    assert {(row["kind"], row["what"]) for row in figures["rows"]} == {
        (kind, what) for kind in ("unitrain", "torch") for what in ("start", "seek")
    }
    assert "| 1e+05 | start, seconds |" in (tmp_path / "sampler.md").read_text()
    assert (tmp_path / "sampler.png").stat().st_size > 0
