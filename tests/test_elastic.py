"""A run that changes its launcher, its backend and its number of ranks within an epoch is the run that did not."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import unitrain

PROGRAM = Path(__file__).parent / "programs" / "elastic.py"
SAMPLES, STEPS_OF_EPOCH = 101, 9
HOROVODRUN_3 = ["horovodrun", "--gloo", "-np", "3", sys.executable]
TORCHRUN_2 = ["torchrun", "--standalone", "--nproc-per-node", "2"]
PYTHON = [sys.executable]
HOROVOD = pytest.mark.skipif(find_spec("horovod") is None, reason="horovod is not installed")


def train(folder: Path, *parts: tuple[list[str], int, int]) -> list[dict[str, Any]]:
    """Run the parts, of a launcher, the step that it ends at and its workers, and return what they noted."""
    folder.mkdir()
    notes = []
    for i, (launcher, last_step, workers) in enumerate(parts):
        job = run_job([*launcher, str(PROGRAM), str(folder), f"part{i}", str(last_step), str(workers)], folder)
        assert job.code == 0, job.output
        for file in folder.glob(f"part{i}.*.notes"):
            notes += [{**json.loads(line), "part": i} for line in file.read_text().splitlines()]
    return notes


def losses(notes: list[dict[str, Any]]) -> list[float]:
    """Return each step's loss: the mean over all its samples, of all ranks and micro-batches."""
    total: dict[int, float] = defaultdict(float)
    count: dict[int, int] = defaultdict(int)
    for note in notes:
        total[note["step"]] += note["loss"]
        count[note["step"]] += len(note["ids"])
    return [total[step] / count[step] for step in sorted(total)]


@HOROVOD
@pytest.mark.launcher
def test_three_ranks_of_horovod_then_two_of_torchrun_then_one(tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", (PYTHON, 27, 0))
    parts = train(tmp_path / "parts", (HOROVODRUN_3, 13, 0), (TORCHRUN_2, 21, 1), (PYTHON, 27, 0))
    assert {note["part"] for note in parts} == {0, 1, 2}
    assert [max(note["step"] for note in parts if note["part"] == part) for part in range(3)] == [12, 20, 26]

    for notes in (alone, parts):
        for epoch in range(3):
            seen = [sample for note in notes if note["epoch"] == epoch for sample in note["ids"]]
            assert sorted(seen) == list(range(SAMPLES)), f"each sample once in epoch {epoch}"
    assert len(losses(alone)) == 3 * STEPS_OF_EPOCH
    assert losses(parts) == pytest.approx(losses(alone), rel=0, abs=1e-9)
    assert losses(alone)[-1] < 0.5 * losses(alone)[0], "a run that learns nothing proves nothing"


def evaluate() -> tuple[int, int]:
    strategy = unitrain.init(timeout_s=60)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1001, 8, generator=generator)
    model = strategy.prepare(nn.Linear(8, 5))
    correct = strategy.meter()
    loader = strategy.dataloader(TensorDataset(inputs, torch.arange(1001) % 5), global_batch_size=64)
    with strategy.evaluation(model):
        for pictures, labels in loader:
            correct.add((model(pictures).argmax(1) == labels).sum(), len(labels))
    return correct.count(), int(correct.sum())


@pytest.mark.parametrize(
    ("world_size", "launcher"),
    [(2, "spawn"), (3, "spawn"), (8, "spawn"), pytest.param(3, "horovodrun", marks=HOROVOD)],
)
def test_an_evaluation_counts_every_sample_once(world_size: int, launcher: Any) -> None:
    """1001 samples can't be dealt out evenly to 2, 3 or 8 ranks, nor their last batch of 41 to 8."""
    (alone,) = run_ranks(evaluate, nprocs=1)
    assert alone[0] == 1001
    assert 0 < alone[1] < 1001
    assert run_ranks(evaluate, nprocs=world_size, launcher=launcher) == [alone] * world_size
