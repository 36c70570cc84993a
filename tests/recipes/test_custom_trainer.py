"""The recipe with a trainer class of its own: the same training on one and two ranks, callbacks, and resuming."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from sklearn.datasets import load_digits  # imported here, so that the ranks need not
from torch import Tensor

from unitrain.recipes import custom_trainer
from unitrain.recipes.image_classification import images

assert load_digits


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(*flags: str) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Run the recipe in this process, and return the metrics and the weights."""
    sys.argv = ["custom_trainer.py", "--output-dir=out", *flags]
    custom_trainer.main()
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    weights: dict[str, Tensor] = torch.load("out/model.pt", weights_only=True)
    return lines, weights


def nearest_mean_accuracy() -> float:
    """Return the accuracy of taking the class whose mean image is nearest."""
    data = images.load("digits", Path(), 8)
    (x, y), (val_x, val_y) = data.train.tensors, data.validation.tensors
    means = torch.stack([x[y == label].flatten(1).mean(0) for label in range(len(data.classes))])
    return float((torch.cdist(val_x.flatten(1), means).argmin(1) == val_y).float().mean())


@pytest.mark.all("test_launchers.py has a recipe under each launcher")
def test_ranks_train_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--strategy.precision=fp64", "--epochs=2", "--batch-size=50")
    found = []
    for nprocs, launcher in ((1, "spawn"), (2, "spawn"), (2, "horovodrun")):
        if launcher == "horovodrun" and HOROVOD.args[0]:
            continue
        made = tmp_path / f"{launcher}{nprocs}"
        made.mkdir()
        monkeypatch.chdir(made)
        found.append(run_ranks(train, *flags, nprocs=nprocs, launcher=launcher, timeout=120)[0])  # type: ignore[arg-type]
    (alone, weights_alone), *others = found
    for lines, weights in others:
        assert [line == pytest.approx(one, rel=1e-9) for line, one in zip(lines, alone, strict=True)] == [True, True]
        for name, weight in weights.items():
            torch.testing.assert_close(weight, weights_alone[name], rtol=1e-9, atol=1e-11)


def test_it_beats_the_nearest_mean_stops_early_and_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    train("--epochs=2", "--lr=0.01", "--patience=1")
    lines, last = train("--epochs=100", "--lr=0.01", "--patience=1")
    assert [line["epoch"] for line in lines] == list(range(len(lines)))
    accuracies = [line["val_accuracy"] for line in lines]
    assert max(accuracies) > nearest_mean_accuracy() + 0.03
    # The first epoch that was no better than the best so far was the last.
    assert [one > max(accuracies[:n], default=0) for n, one in enumerate(accuracies)] == [True] * (len(lines) - 1) + [
        False
    ]
    best = torch.load("out/best.pt", weights_only=True)
    assert not torch.equal(best["1.weight"], last["1.weight"])
    assert f"best accuracy {max(accuracies):.2%}" in capsys.readouterr().out
    # Its callbacks' states come back, so nothing is left to train.
    assert train("--epochs=100", "--lr=0.01", "--patience=1")[0] == lines
