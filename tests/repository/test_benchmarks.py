"""Every benchmark runs, in its short form. Times are not checked."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import run_job
from places import ROOT

BENCHMARKS = ROOT / "benchmarks"


def short(name: str, folder: Path) -> dict[str, Any]:
    """Run a benchmark's short form, and return what it found."""
    job = run_job(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--short", "--output", str(folder)], folder, deadline=280
    )
    assert job.code == 0, job.output
    assert not job.left
    text = (folder / f"{name}.md").read_text()
    assert text.startswith(f"`python benchmarks/{name}.py`")
    assert "| --- |" in text
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert found["versions"]["torch"]
    assert found["machine"]["cores"] > 0
    return found


@pytest.mark.launcher
@pytest.mark.soak
def test_step_overhead(tmp_path: Path) -> None:
    found = short("step_overhead", tmp_path)
    loops = {case["world"][0]: case["loops"] for case in found["cases"]}
    assert {"Accelerate", "Fabric", "by hand", "UniTrain", "Ignite"} <= set(loops["torchrun"])
    assert set(loops["horovodrun"]) == set(loops["torchrun"]) - {"Accelerate", "Fabric"}
    for its in loops.values():
        assert all(one["weights_bit_equal"] for one in its.values()), "all loops must train the same model"
    for case in found["sharded"]:
        assert set(case["loops"]) >= {"FSDP2 by hand", "UniTrain", "Accelerate", "DDP by hand"}
        assert all(one["weights_differ_by"] < 1e-5 for one in case["loops"].values()), case


@pytest.mark.launcher
@pytest.mark.soak
def test_averaging(tmp_path: Path) -> None:
    found = short("averaging", tmp_path)
    for case in found["cases"]:
        trained = [one["weights_bit_equal"] for one in case["ways"].values() if "weights_bit_equal" in one]
        assert trained == [True] * (4 if case["world"][0] == "torchrun" else 3)
    assert set(found["links"]) | set(found["left_out"]) == {"1 Gbit/s"}
    if os.geteuid() == 0 and shutil.which("tc"):
        assert set(found["links"]["1 Gbit/s"]) == set(found["learning"]), found["left_out"]
        sent = {name: one["bytes"] for name, one in found["language"]["settings"].items()}
        assert len(sent) == 6
        assert sent["bf16"] < 0.7 * sent["none"]
        assert sent["DiLoCo, 4 steps"] < 0.5 * sent["none"]
        namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert "bench-" not in namespaces


@pytest.mark.launcher
@pytest.mark.soak
def test_sharded_optimizer(tmp_path: Path) -> None:
    for (launcher, _), ways in short("sharded_optimizer", tmp_path)["worlds"]:
        for kind in ("AdamW", "Muon"):
            assert (f"{kind}, by hand, ZeroRedundancyOptimizer" in ways) == (launcher == "torchrun")
            assert ways[f"{kind}, UniTrain"]["state_mb"] < 0.55 * ways[f"{kind}, by hand"]["state_mb"]
            assert ways[f"{kind}, UniTrain"]["largest_difference"] < 1e-6


@pytest.mark.soak
def test_loading(tmp_path: Path) -> None:
    found = short("loading", tmp_path)
    assert {(case["data"], case["workers"]) for case in found["cases"]} == {
        (data, workers) for data in ("rows", "rows, own class", "crops", "images") for workers in (0, 2)
    }
    assert all(len(case["ways"]) == 3 for case in found["cases"])
    assert {(row["kind"], row["what"]) for row in found["epochs"]} == {
        (kind, what) for kind in ("unitrain", "torch") for what in ("start", "seek")
    }


@pytest.mark.launcher
@pytest.mark.soak
def test_checkpoints(tmp_path: Path) -> None:
    found = short("checkpoints", tmp_path)
    assert len(found["stalls"]) == 6
    assert all(found["totals"][name]["seconds"] >= one["seconds"] for name, one in found["stalls"].items())
    assert found["copies"]
    assert all(case["bytes"] > 4 * (64 * 64 + 64 * 10) for case in found["copies"])


@pytest.mark.launcher
@pytest.mark.soak
def test_memory(tmp_path: Path) -> None:
    found = short("memory", tmp_path)
    cases = found["cases"]
    by_way = {case["way"]: case["tensors"] for case in cases}
    assert list(by_way) == ["ddp", "fsdp", "fsdp, meta device", "ddp, shard_optimizer", "horovod, shard_optimizer"]
    ddp, fsdp, *divided = by_way.values()
    assert all(one["stepped"] < 0.8 * ddp["stepped"] for one in divided)  # 3 of 4 tensors, on two processes
    assert fsdp["prepared"] < 0.6 * ddp["prepared"]
    assert fsdp["stepped"] < 0.6 * ddp["stepped"]
    assert fsdp["step"] < 1.1 * 4 * found["weights"] / 2 + found["unit"]
    assert all(case["resident"]["resume"] >= 0 for case in cases)


@pytest.mark.launcher
@pytest.mark.soak
def test_startup(tmp_path: Path) -> None:
    found = short("startup", tmp_path)
    assert set(found["imports"]) == {"import torch", "import torch, unitrain"}
    [(world, ways)] = found["worlds"]
    assert world == ["torchrun", 2]
    assert 0 < ways["by hand"]["seconds"] < 120
    assert 0 < ways["UniTrain"]["seconds"] < 120


@pytest.mark.launcher
@pytest.mark.soak
@pytest.mark.xdist_group("cluster")
def test_restarts(tmp_path: Path) -> None:
    found = short("restarts", tmp_path)
    assert found["left_out"] is None or os.geteuid() != 0
    for case in found["cases"]:
        assert set(case["ways"]) == {"by hand", "UniTrain"}
        for one in case["ways"]["UniTrain"]:
            assert one["loss"]["lost"] <= 1
            assert one["return"]["lost"] == 0


@pytest.mark.launcher
@pytest.mark.soak
def test_balanced_batches(tmp_path: Path) -> None:
    for worlds in short("balanced_batches", tmp_path)["tasks"].values():
        padding = {name: way["padding"] for name, way in worlds["2"].items()}
        assert len(padding) == 6
        assert padding["lengths, sorted in windows"] <= padding["lengths"] < padding["every W-th sample"]


@pytest.mark.soak
def test_gpu_on_a_cpu(tmp_path: Path) -> None:
    cases = short("gpu", tmp_path)["cases"]
    assert {(case["model"], case["compiled"]) for case in cases} == {("resnet50", False), ("vit_b_16", True)}
    for case in cases:
        assert set(case["ways"]) == {"tuned by hand", "tuned by hand, again", "UniTrain", "Accelerate", "Fabric"}
        assert case["operations_per_image"] > 0


@pytest.mark.launcher
@pytest.mark.soak
def test_watch(tmp_path: Path) -> None:
    found = short("watch", tmp_path)
    [(world, costs)] = found["worlds"]
    assert world == ["torchrun", 2]
    assert 0 < costs["watching"] < 1
    assert costs["comparing_s"] > 0
    [job] = found["jobs"]
    assert job["ranks"] == 64
    assert 0 < job["hub"] < 1
    assert 0 < job["endpoint"]["bytes"] < 64 * 1000
    stages = job["stages"]
    assert stages["meeting at the store"]["keys"] == 66
    assert stages["the end of a rank"]["told_s"] <= stages["the end of a rank"]["ended_s"]
    assert all(0 < one["bytes"] < 64 * 20_000 for one in stages.values())


def test_each_benchmark_is_tested_and_has_its_table() -> None:
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert {path.stem for path in BENCHMARKS.glob("results/*.md")} == scripts
    assert set(re.findall(r'short\("(\w+)", tmp_path\)', Path(__file__).read_text())) == scripts
    assert set(re.findall(r"benchmarks/results/(\w+)\.md", (ROOT / "docs/about/tables.md").read_text())) == scripts


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


@pytest.mark.launcher
@pytest.mark.soak
def test_one_curve(tmp_path: Path) -> None:
    curves = short("one_curve", tmp_path)["curves"]
    assert {"python", "torchrun", "spawn"} <= set(curves)
    assert (tmp_path / "one_curve.png").stat().st_size > 0
    for lines in curves.values():
        for line, alone in zip(lines, curves["python"], strict=True):
            assert line["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-9)
