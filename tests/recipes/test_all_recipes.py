"""What holds for every recipe: it is short, names no backend, and trains the same model on any ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD
from places import ROOT
from ranks import run_ranks
from recipe_runs import run_recipe, write_documents
from sklearn.datasets import load_digits  # imported here, so that the ranks need not
from torch import Tensor

from unitrain.communication.backend import backend_names
from unitrain.recipes.speaker_verification import synthesis

assert load_digits
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("[!_]*.py") if path.stem != "compare")
# Two ranks have different numbers of the samples of a step.
FLAGS = {
    "custom_trainer": "--epochs=2 --batch-size=51",
    "detection": "--data=shapes:30 --batch-size=9 --max-steps=4 --baselines --strategy.sync-batchnorm=true",
    "gan": "--batch-size=701 --max-steps=5 --evaluate-every=1 --strategy.sync-batchnorm=true",
    "language_model": "--data=texts --context=32 --layers=2 --width=16 --heads=2 --batch-size=15 --warmup-epochs=0.1 "
    "--sample=30 --max-steps=15 --epochs=3",
    "ppo": "--environments=4 --steps=64 --batch-size=51 --rounds=2 --epochs=2",
    "speaker": "--data=voxceleb:speech --seconds=0.2 --test-seconds=0.2 --test-crops=2 --batch-size=6 --epochs=1 "
    "--utterances-per-speaker=3 --strategy.sync-batchnorm=true",
}
PICTURES = {"detection": "detections.png", "gan": "generated.png", "ppo": "curves.png", "speaker": "curves.png"}
RESULT = r"epoch|round|step$|loss|map|accuracy|perplexity|distance|return|eer|dcf"
LATER = pytest.mark.all("test_launchers.py has a recipe under each launcher")
Trained = tuple[list[dict[str, Any]], dict[str, Tensor]]


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_short_and_names_no_backend(name: str) -> None:
    source = (ROOT / "recipes" / f"{name}.py").read_text()
    assert len([line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]) <= 150
    if name != "pipeline":  # which needs ddp's process group
        assert not re.search(rf"\b({'|'.join(backend_names())})\b", source)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder in which recipes run."""
    folder = tmp_path_factory.mktemp("recipes")
    write_documents(folder / "texts")
    synthesis.make(folder / "speech", train=(4, 9), test=(4, 3))
    return folder


def train(folder: Path, name: str, backend: str) -> Trained:
    os.chdir(folder)
    output = folder / f"{name}-{backend}"
    flags = (*FLAGS[name].split(), "--strategy.precision=fp64", f"--strategy.backend={backend}")
    return run_recipe(name, *flags, output=output), torch.load(output / "model.pt", weights_only=True)


def train_alone(folder: Path, name: str) -> Trained:
    trained: Trained = run_ranks(train, folder, name, "single", nprocs=1, launcher="python", timeout=120)[0]
    return trained


@pytest.fixture(scope="module")
def alone(data: Path) -> Callable[[str], Trained]:
    """Return a function that trains a recipe in one process, once."""
    return cache(partial(train_alone, data))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("speaker", "ddp"),
        *(pytest.param(name, "ddp", marks=LATER) for name in FLAGS if name != "speaker"),
        *(pytest.param(name, "fsdp", marks=LATER) for name in ("gan", "language_model", "ppo")),
        *(pytest.param(name, "horovod", marks=[LATER, HOROVOD]) for name in FLAGS),
    ],
)
def test_ranks_train_the_model_of_one_process(
    alone: Callable[[str], Trained], data: Path, name: str, backend: str
) -> None:
    lines, weights = run_ranks(train, data, name, backend, timeout=120)[0]
    expected_lines, expected_weights = alone(name)
    for line, expected in zip(lines, expected_lines, strict=True):
        results = {key for key in line if re.search(RESULT, key)}
        assert len(results) > 3
        for key in results:
            assert line[key] == pytest.approx(expected[key], rel=1e-9), key
    for key, weight in expected_weights.items():
        torch.testing.assert_close(weights[key], weight, rtol=1e-9, atol=1e-11)
    if name in PICTURES:
        assert (data / f"{name}-{backend}" / PICTURES[name]).read_bytes().startswith(b"\x89PNG")
