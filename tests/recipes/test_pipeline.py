"""The recipe of a pipeline: the same training as in one process, and its checkpoints with another number of stages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from sklearn.datasets import load_digits  # imported here, so that the ranks need not
from torch import Tensor

import unitrain
from unitrain import ConfigError
from unitrain.recipes import pipeline
from unitrain.recipes.image_classification import images

assert load_digits
BATCH, CLIP = 256, 0.7


def train(folder: str, *flags: str) -> None:
    sys.argv = ["pipeline.py", f"--output-dir={folder}", f"--batch-size={BATCH}", "--depth=2", *flags]
    pipeline.main()


def plainly_trained(epochs: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train the whole model with a plain loop on the same batches. Return the losses of the epochs, and the weights."""
    losses = []
    with unitrain.init(backend="single", device="cpu") as strategy:
        digits = images.load("digits", Path(), 8)
        model = pipeline.Net(3 * 8 * 8, 64, 2, 10).double()
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
        loader = strategy.dataloader(digits.train, global_batch_size=BATCH, shuffle=True, drop_last=True)
        for _ in range(epochs):
            found = []
            for inputs, labels in loader:
                loss = F.cross_entropy(model(inputs.flatten(1).double()), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            losses.append(sum(found) / len(found))
    return losses, model.state_dict()


@pytest.mark.all("a recipe on several ranks")
def test_stages_train_the_model_of_one_process_and_resume_in_other_stages(tmp_path: Path) -> None:
    flags = ("--strategy.precision=fp64", "--strategy.device=cpu", f"--strategy.clip-norm={CLIP}")
    run_ranks(train, str(tmp_path), "--epochs=1", *flags, nprocs=2)
    run_ranks(train, str(tmp_path), "--epochs=2", "--schedule=gpipe", *flags, nprocs=3)
    losses, weights = plainly_trained(2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1]
    assert [line["train_loss"] for line in lines] == pytest.approx(losses, rel=1e-9)
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-11)
    assert lines[1]["val_accuracy"] > 0.5


def test_one_process_and_what_would_have_no_effect_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a pipeline needs backend ddp, and 2 to depth"):
        train(str(tmp_path), "--strategy.device=cpu")
