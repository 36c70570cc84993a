"""Figures of a run: its curves and its confusion matrix, as PNG files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

_MOST_NAMED = 20  # more classes would not be legible


def draw_classification(folder: Path, labels: Tensor, predicted: Tensor, classes: Sequence[str]) -> None:
    """Draw the curves and the confusion matrix of a classifier.

    Args:
        folder: the run's folder.
        labels: the true class of each sample.
        predicted: the predicted class of each sample.
        classes: the names of the classes.
    """
    draw_curves(folder, {"loss": ["train_loss", "val_loss"], "accuracy": ["val_accuracy"]})
    draw_confusion_matrix(folder, labels, predicted, classes)


def draw_curves(folder: Path, axes: Mapping[str, Sequence[str]], by: str = "epoch") -> None:
    """Draw metrics of a run, from its ``metrics.jsonl`` into ``curves.png``.

    Args:
        folder: the run's folder.
        axes: the names of the metrics in each diagram, by the label of its vertical axis.
        by: the name of the number of each line, counted from 0, that the horizontal axes show.
    """
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(5 * len(axes), 4), layout="constrained")
    for axis, (label, names) in zip(figure.subplots(1, len(axes), squeeze=False)[0], axes.items(), strict=True):
        for name in names:
            points = [(line[by] + 1, line[name]) for line in lines if name in line]
            axis.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else "")
        axis.set(xlabel=by, ylabel=label)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(folder / "curves.png", dpi=100)


def draw_confusion_matrix(folder: Path, labels: Tensor, predicted: Tensor, classes: Sequence[str]) -> None:
    """Draw which classes were taken for which, as fractions of each class, into ``confusion_matrix.png``."""
    from sklearn.metrics import ConfusionMatrixDisplay  # takes a second to import

    named = len(classes) <= _MOST_NAMED
    size = 2 + 0.45 * min(len(classes), _MOST_NAMED)
    figure = Figure(figsize=(size, size), layout="constrained")
    ConfusionMatrixDisplay.from_predictions(
        labels.cpu().numpy(),
        predicted.cpu().numpy(),
        labels=range(len(classes)),
        display_labels=classes if named else None,
        normalize="true",
        include_values=named,
        values_format=".2g",
        xticks_rotation="vertical",
        cmap="Blues",
        colorbar=False,
        ax=figure.subplots(),
    )
    figure.savefig(folder / "confusion_matrix.png", dpi=100)
