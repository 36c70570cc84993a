"""Every benchmark runs, in its short form, and what it says of more than times is right."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import run_job
from places import ROOT

BENCHMARKS = ROOT / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
Check = Callable[[dict[str, Any]], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Record what is checked of the results of the benchmark with a function's name."""
    CHECKS[function.__name__] = function
    return function


@check
def step_overhead(found: dict[str, Any]) -> None:
    loops = {case["world"][0]: case["loops"] for case in found["cases"]}
    assert {"Accelerate", "Fabric", "by hand", "UniTrain", "Ignite"} <= set(loops["torchrun"])
    assert set(loops["horovodrun"]) == set(loops["torchrun"]) - {"Accelerate", "Fabric"}
    for ways in loops.values():
        assert all(way["weights_bit_equal"] for way in ways.values()), "all loops must train the same model"
    for case in found["sharded"]:
        assert set(case["loops"]) >= {"FSDP2 by hand", "UniTrain", "Accelerate", "DDP by hand"}
        assert all(way["weights_differ_by"] < 1e-5 for way in case["loops"].values()), case


@check
def averaging(found: dict[str, Any]) -> None:
    for case in found["cases"]:
        trained = [way["weights_bit_equal"] for way in case["ways"].values() if "weights_bit_equal" in way]
        assert trained == [True] * (4 if case["world"][0] == "torchrun" else 3)
    assert set(found["links"]) | set(found["left_out"]) == {"1 Gbit/s"}
    if os.geteuid() == 0 and shutil.which("tc"):
        assert set(found["links"]["1 Gbit/s"]) == set(found["learning"]), found["left_out"]
        sent = {name: way["bytes"] for name, way in found["language"]["settings"].items()}
        assert len(sent) == 6
        assert sent["bf16"] < 0.7 * sent["none"]
        assert sent["DiLoCo, 4 steps"] < 0.5 * sent["none"]
        namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert "bench-" not in namespaces


@check
def horovod_scripts(found: dict[str, Any]) -> None:
    for case in found["cases"]:
        assert [way["weights_bit_equal"] for way in case["ways"].values()] == [True] * 3


@check
def sharded_optimizer(found: dict[str, Any]) -> None:
    for (launcher, _), ways in found["worlds"]:
        for kind in ("AdamW", "Muon"):
            assert (f"{kind}, by hand, ZeroRedundancyOptimizer" in ways) == (launcher == "torchrun")
            assert ways[f"{kind}, UniTrain"]["state_mb"] < 0.55 * ways[f"{kind}, by hand"]["state_mb"]
            assert ways[f"{kind}, UniTrain"]["largest_difference"] < 1e-6


@check
def memory(found: dict[str, Any]) -> None:
    by_way = {case["way"]: case["tensors"] for case in found["cases"]}
    assert list(by_way) == ["ddp", "fsdp", "fsdp, meta device", "ddp, shard_optimizer", "horovod, shard_optimizer"]
    ddp, fsdp, *divided = by_way.values()
    assert all(tensors["stepped"] < 0.8 * ddp["stepped"] for tensors in divided)  # 3 of 4 tensors, on two processes
    assert fsdp["prepared"] < 0.6 * ddp["prepared"]
    assert fsdp["stepped"] < 0.6 * ddp["stepped"]
    assert fsdp["step"] < 1.1 * 4 * found["weights"] / 2 + found["unit"]
    for case in found["divided"]:
        one, two = case["ways"]["one rank"], case["ways"]["two ranks"]
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["mb"] < one["mb"]


@check
def restarts(found: dict[str, Any]) -> None:
    assert found["left_out"] is None or os.geteuid() != 0
    for case in found["cases"]:
        assert set(case["ways"]) == {"by hand", "UniTrain"}
        for way in case["ways"]["UniTrain"]:
            assert way["loss"]["lost"] <= 1
            assert way["return"]["lost"] == 0


@check
def balanced_batches(found: dict[str, Any]) -> None:
    for worlds in found["tasks"].values():
        padding = {name: way["padding"] for name, way in worlds["2"].items()}
        assert len(padding) == 6
        assert padding["lengths, sorted in windows"] <= padding["lengths"] < padding["every W-th sample"]


@check
def one_curve(found: dict[str, Any]) -> None:
    curves = found["curves"]
    assert {"python", "torchrun", "spawn"} <= set(curves)
    for lines in curves.values():
        for line, alone in zip(lines, curves["python"], strict=True):
            assert line["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-9)


@pytest.mark.launcher
@pytest.mark.soak
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.xdist_group("cluster")] * (name == "restarts")) for name in NAMES]
)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--short", "--output", str(tmp_path)]
    job = run_job(command, tmp_path, deadline=280)
    assert job.code == 0, job.output
    assert not job.left
    text = (tmp_path / f"{name}.md").read_text()
    assert text.startswith(f"`python benchmarks/{name}.py`")
    assert "| --- |" in text
    found: dict[str, Any] = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["versions"]["torch"]
    assert found["machine"]["cores"] > 0
    if name in CHECKS:
        CHECKS[name](found)


def test_each_benchmark_has_its_table() -> None:
    assert sorted(path.stem for path in BENCHMARKS.glob("results/*.md")) == NAMES
    assert set(re.findall(r"benchmarks/results/(\w+)\.md", (ROOT / "docs/about/tables.md").read_text())) == {*NAMES}
    assert set(CHECKS) <= set(NAMES)


def labels(folder: Path) -> dict[str, list[str]]:
    """Return what is written in each chart of a folder, its numbers included."""
    return {path.name: re.findall(r"<text.*?>(.*?)</text>", path.read_text()) for path in folder.glob("*.svg")}


def test_the_figures_are_drawn_from_the_results_and_shown_on_pages(tmp_path: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "shared" / "figures.py"), "--output", str(tmp_path)]
    subprocess.run(script, check=True, timeout=100)
    drawn = labels(tmp_path)
    assert all(len(texts) > 5 for texts in drawn.values())
    assert labels(ROOT / "docs" / "figures") == drawn, "run: python benchmarks/shared/figures.py"
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert set(re.findall(r"!\[[^]]+\]\([./]*figures/([a-z_]+\.svg)\)", pages)) == set(drawn)
