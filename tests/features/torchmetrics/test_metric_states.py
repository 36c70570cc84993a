"""What torchmetrics' metrics have accumulated on each rank: saved with a run, and exact after it on any world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from needs import HOROVOD
from ranks import run_ranks
from torch import Tensor, nn
from torchmetrics.utilities import dim_zero_cat

import unitrain
from unitrain import CheckpointError
from unitrain.features.torchmetrics import synchronise_metric

ROWS = 60
PREDICTIONS = torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(3, (ROWS,), generator=torch.Generator().manual_seed(1))


class Range(torchmetrics.Metric):
    """Whatever is not a sum: a maximum, a minimum and a list."""

    highest: Tensor
    lowest: Tensor
    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("highest", torch.tensor(-1.0), dist_reduce_fx="max")
        self.add_state("lowest", torch.tensor(9.0), dist_reduce_fx="min")
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.highest = torch.maximum(self.highest, predictions.max())
        self.lowest = torch.minimum(self.lowest, predictions.min())
        self.rows.append(labels.clone())

    def compute(self) -> tuple[float, float, int]:
        rows = dim_zero_cat(self.rows)
        return float(self.highest), float(self.lowest), int((rows * rows).sum())


def metrics() -> dict[str, Any]:
    options: dict[str, Any] = {"task": "multiclass", "num_classes": 3}
    return {
        "accuracy": torchmetrics.Accuracy(**options),  # a sum
        "auroc": torchmetrics.AUROC(**options),  # lists of rows
        "range": Range(),
        "collection": torchmetrics.MetricCollection(
            [torchmetrics.Precision(**options), torchmetrics.Recall(**options), torchmetrics.ConfusionMatrix(**options)]
        ),
    }


def evaluate(folder: str, backend: str, first: int, last: int) -> dict[str, Any]:
    """Go on to evaluate rows from where the checkpoint was saved, save, and return all metrics."""
    with unitrain.init(backend=backend, device="cpu") as strategy:
        used = metrics()
        for metric in (used["accuracy"], used["auroc"], used["range"], *used["collection"].values()):
            synchronise_metric(metric, strategy)
        checkpoint = strategy.checkpoint(folder, **used)
        assert checkpoint.resume() == (first > 0)
        mine = torch.tensor([row for row in range(first, last) if row % strategy.world_size == strategy.rank])
        for part in torch.split(mine, 4):
            for metric in used.values():
                metric.update(PREDICTIONS[part], LABELS[part])
        strategy._step.global_step = last
        checkpoint.save()
        return {name: metric.compute() for name, metric in used.items()}


@pytest.mark.parametrize(
    "worlds",
    [
        [("ddp", 3, "spawn"), ("ddp", 2, "spawn"), ("single", 1, "spawn"), ("ddp", 2, "spawn")],
        pytest.param([("horovod", 2, "horovodrun"), ("ddp", 3, "spawn")], marks=HOROVOD),
    ],
    ids=["ddp", "horovod"],
)
def test_metrics_go_on_where_they_were_saved(tmp_path: Path, worlds: list[tuple[str, int, Any]]) -> None:
    ends = [ROWS * (i + 1) // len(worlds) for i in range(len(worlds))]
    for (backend, world, launcher), first, last in zip(worlds, [0, *ends], ends, strict=False):
        found = run_ranks(evaluate, str(tmp_path / "run"), backend, first, last, nprocs=world, launcher=launcher)
    expected = evaluate(str(tmp_path / "whole"), "single", 0, ROWS)
    torch.testing.assert_close(found, [expected] * len(found), rtol=0, atol=1e-6)


class Mean(torchmetrics.Metric):
    """A mean of the ranks' means, which depends on how many there are."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, value: float) -> None:
        self.value += value

    def compute(self) -> Tensor:
        return self.value


class Model(nn.Module):
    """A model with a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.mean = Mean()


def divide(folder: str, value: float, force: bool) -> tuple[str, float]:
    """Resume, and return what was said and this rank's state. Then add a value, and save."""
    with unitrain.init(device="cpu") as strategy:
        model = strategy.prepare(Model())
        mean: Any = strategy.unwrap(model).get_submodule("mean")
        checkpoint = strategy.checkpoint(folder, model=model)
        try:
            checkpoint.resume(force=force)
        except CheckpointError as error:
            return str(error), float(mean.value)
        if value:
            mean.update(value + strategy.rank)
            strategy._step.global_step += 1
            checkpoint.save()
        return "", float(mean.value)


def test_what_can_not_be_divided_is_refused_or_reset(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert run_ranks(divide, folder, 1.0, False) == [("", 1.0), ("", 2.0)]
    assert run_ranks(divide, folder, 0.0, False) == [("", 1.0), ("", 2.0)], "each rank's own"
    said = (
        "the metric model.mean can't be divided among 3 processes instead of 2: its state value is reduced over the "
        "ranks by mean. Resume with 2 processes, or with resume(force=True), which resets the metric. Nothing was "
        "loaded."
    )
    assert run_ranks(divide, folder, 0.0, False, nprocs=3) == [(said, 0.0)] * 3
    assert run_ranks(divide, folder, 0.0, True, nprocs=3) == [("", 0.0)] * 3
