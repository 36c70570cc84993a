"""torchmetrics' metrics over several ranks: the numbers of one process, whatever a rank has, also in a resumed run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from needs import HOROVOD
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.detection import MeanAveragePrecision
from torchmetrics.utilities import dim_zero_cat

import unitrain
from unitrain import CheckpointError, UsageError
from unitrain.features.torchmetrics import synchronise_metric

CLASSES = 3
# What torchmetrics says of a rank without rows, and of classes that do not occur.
FEW_ROWS = pytest.mark.filterwarnings("ignore:.*was called before the:UserWarning", "ignore:No .* samples:UserWarning")
OPTIONS: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}


def rows(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.rand(count, CLASSES, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def classification() -> dict[str, Any]:
    """A metric of each kind that synchronises in a way of its own."""
    accuracy, auroc = torchmetrics.Accuracy(**OPTIONS), torchmetrics.AUROC(**OPTIONS)
    return {
        "sum": torchmetrics.Accuracy(**OPTIONS),
        "rows": torchmetrics.AUROC(**OPTIONS),
        "composition": accuracy + 2 * auroc,
        "wrapper": torchmetrics.wrappers.ClasswiseWrapper(torchmetrics.Recall(**OPTIONS, average=None)),
        "collection": torchmetrics.MetricCollection(
            [torchmetrics.Precision(**OPTIONS), torchmetrics.ConfusionMatrix(**OPTIONS), torchmetrics.AUROC(**OPTIONS)]
        ),
        "tracker": torchmetrics.wrappers.MetricTracker(torchmetrics.AUROC(**OPTIONS)),
    }


def classify(backend: str, counts: list[int]) -> list[dict[str, Any]]:
    """Return every metric's value of each of several sets of rows: some ranks have none."""
    with unitrain.init(backend=backend, device="cpu", precision="fp64") as strategy:
        metrics = {name: synchronise_metric(metric, strategy) for name, metric in classification().items()}
        values = []
        for count in counts:
            metrics["tracker"].increment()
            for predictions, labels in strategy.dataloader(TensorDataset(*rows(count)), batch_size=8, shuffle=False):
                for metric in metrics.values():
                    metric.update(predictions, labels)
            values.append({name: metric.compute() for name, metric in metrics.items()})
            for name in metrics.keys() - {"tracker"}:
                metrics[name].reset()
        return values


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=HOROVOD)])
@on_ranks()
def test_a_metric_that_was_not_passed_is_refused_on_every_rank(backend: str) -> None:
    """On rank 0 alone as well; and it is computed where that is meant."""
    with unitrain.init(backend=backend, device="cpu", timeout_s=30) as strategy:
        metric = torchmetrics.SumMetric()
        metric.update(strategy.rank + 1.0)
        for compute in (metric.compute, lambda: strategy.on_main(metric.compute)):
            with pytest.raises(UsageError, match=r"^SumMetric was not passed to synchronise_metric\(\)"):
                compute()
        alone = torchmetrics.SumMetric(sync_on_compute=False)
        explicit = torchmetrics.SumMetric(distributed_available_fn=lambda: False)
        for one in (alone, explicit, passed := synchronise_metric(torchmetrics.SumMetric(), strategy)):
            one.update(strategy.rank + 1.0)
        values = [float(one.compute()) for one in (alone, explicit, passed)]
        values.append(float(strategy.on_main(alone.compute)))
        other = synchronise_metric(torchmetrics.SumMetric(), strategy)
        other.update(1.0)
        with pytest.raises(UsageError, match=r"was called within on_main, where only rank 0 is"):
            strategy.on_main(other.compute)
    values.append(float(metric.compute()))  # the strategy is closed
    assert values == [strategy.rank + 1, strategy.rank + 1, 3, 1, strategy.rank + 1]


@FEW_ROWS
@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=HOROVOD)])
def test_ranks_with_few_rows_or_none_give_the_values_of_one_process(backend: str) -> None:
    counts = [29, 2, 1]
    expected = classify("single", counts)
    found = run_ranks(classify, backend, counts, nprocs=3)
    torch.testing.assert_close(found, [expected] * 3, rtol=0, atol=1e-6)


def detect(backend: str, images: int) -> dict[str, Any]:
    """Return COCO's mAP of boxes and masks, which are lists of one item per image."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(images, 2, 2, 2, generator=generator) * 20
    labels = torch.randint(2, (images, 2), generator=generator)
    scores = torch.rand(images, 2, generator=generator)
    with unitrain.init(backend=backend, device="cpu") as strategy:
        metric = synchronise_metric(MeanAveragePrecision(iou_type=("bbox", "segm")), strategy)
        for (index,) in strategy.dataloader(TensorDataset(torch.arange(images)), batch_size=4, shuffle=False):
            for image in index.tolist():
                boxes = torch.cat([corners[image].amin(1), corners[image].amax(1) + 8], dim=1)
                masks = torch.zeros(2, 32, 32, dtype=torch.bool)
                for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
                    mask[top:bottom, left:right] = True
                moved = torch.cat([boxes[:, :2] + image % 3, boxes[:, 2:]], dim=1)
                metric.update(
                    [{"boxes": moved, "masks": masks, "scores": scores[image], "labels": labels[image]}],
                    [{"boxes": boxes, "masks": masks.roll(image % 3, 1), "labels": labels[image]}],
                )
        return metric.compute()


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=HOROVOD)])
def test_map_of_ranks_with_unequal_numbers_of_images_is_that_of_one_process(backend: str) -> None:
    expected = detect("single", 7)
    assert 0.1 < expected["bbox_map"] < 0.9
    found = run_ranks(detect, backend, 7)
    torch.testing.assert_close(found, [expected] * 2, rtol=0, atol=0)


def train(samples: int) -> list[dict[str, Any]]:
    """Return the values of the metrics after batches of which one rank has a stand-in only, from the first on."""
    with unitrain.init(device="cpu") as strategy:
        model = nn.Linear(CLASSES, CLASSES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = strategy.prepare(model, optimizer)
        kinds = [name for name in classification() if name != "tracker"]
        updated, called = (
            {name: synchronise_metric(classification()[name], strategy) for name in kinds} for _ in range(2)
        )
        for predictions, labels in strategy.dataloader(TensorDataset(*rows(samples)), batch_size=1, shuffle=False):
            for name, metric in updated.items():
                metric.update(predictions, labels)
                called[name](predictions, labels)
            strategy.step(model(predictions).sum(), optimizer)
        return [{name: metric.compute() for name, metric in kind.items()} for kind in (updated, called)]


@FEW_ROWS
def test_stand_ins_change_no_metric() -> None:
    for values in run_ranks(train, 5, nprocs=2):
        torch.testing.assert_close(values, run_ranks(train, 5, nprocs=1)[0], rtol=0, atol=1e-6)


def test_a_copy_of_a_metric_is_another_metric() -> None:
    with unitrain.init(device="cpu") as strategy:
        metric = synchronise_metric(torchmetrics.Accuracy(**OPTIONS), strategy)
        for other in (metric.clone(), copy.deepcopy(metric)):
            other.update(*rows(4))
            other(*rows(4))
            assert other.update_count == 2
        assert metric.update_count == 0


class Latest(torchmetrics.Metric):
    """The mean, and a list, of what each rank has seen last."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("each", torch.tensor(0.0), dist_reduce_fx=None)
        self.add_state("median", torch.tensor(0.0), dist_reduce_fx=lambda ranks: ranks.median())

    def update(self, value: float) -> None:
        self.mean, self.each, self.median = torch.tensor([value] * 3)

    def compute(self) -> list[Any]:
        return [self.mean.item(), self.each.tolist(), self.median.item()]


@FEW_ROWS
@on_ranks(nprocs=3)
def test_a_rank_without_samples_does_not_count_in_a_mean_over_the_ranks() -> None:
    with unitrain.init(device="cpu") as strategy:
        metric = synchronise_metric(Latest(), strategy)
        if strategy.rank != 1:
            metric.update(8.0 if strategy.is_main else 2.0)
        assert metric.compute() == [5.0, [8.0, 2.0], 2.0]


ROWS = 60


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


def stateful() -> dict[str, Any]:
    return {
        "accuracy": torchmetrics.Accuracy(**OPTIONS),  # a sum
        "auroc": torchmetrics.AUROC(**OPTIONS),  # lists of rows
        "range": Range(),
        "collection": torchmetrics.MetricCollection(
            [torchmetrics.Recall(**OPTIONS), torchmetrics.ConfusionMatrix(**OPTIONS)]
        ),
    }


def evaluate(folder: str, backend: str, first: int, last: int, size: int = 1) -> dict[str, Any]:
    """Go on to evaluate rows from where the checkpoint was saved, save, and return all metrics.

    ``size`` ranks evaluate the same rows.
    """
    with unitrain.init(backend=backend, device="cpu", ranks_per_batch=size) as strategy:
        used = stateful()
        for metric in (used["accuracy"], used["auroc"], used["range"], *used["collection"].values()):
            synchronise_metric(metric, strategy)
        checkpoint = strategy.checkpoint(folder, **used)
        assert checkpoint.resume() == (first > 0)
        readers, reader = strategy.world_size // size, strategy.rank // size
        mine = torch.tensor([row for row in range(first, last) if row % readers == reader])
        predictions, labels = rows(ROWS)
        for part in torch.split(mine, 4):
            for metric in used.values():
                metric.update(predictions[part], labels[part])
        strategy._step.global_step = last
        checkpoint.save()
        return {name: metric.compute() for name, metric in used.items()}


@pytest.mark.parametrize(
    "worlds",
    [
        [("ddp", 3, 1), ("ddp", 2, 1), ("single", 1, 1), ("ddp", 2, 2), ("ddp", 2, 1)],
        pytest.param([("horovod", 2, 1), ("ddp", 3, 1)], marks=HOROVOD),
    ],
    ids=["ddp", "horovod"],
)
def test_metrics_go_on_where_they_were_saved(tmp_path: Path, worlds: list[tuple[str, int, int]]) -> None:
    ends = [ROWS * (i + 1) // len(worlds) for i in range(len(worlds))]
    for (backend, world, size), first, last in zip(worlds, [0, *ends], ends, strict=False):
        found = run_ranks(evaluate, str(tmp_path / "run"), backend, first, last, size, nprocs=world)
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
    for refusal, value in run_ranks(divide, folder, 0.0, False, nprocs=3):
        assert refusal.endswith(said)
        assert value == 0.0
    assert run_ranks(divide, folder, 0.0, True, nprocs=3) == [("", 0.0)] * 3
