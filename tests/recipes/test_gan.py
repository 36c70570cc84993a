"""The GAN recipe: the same training under every launcher, what it writes, and its score."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import run_job
from needs import HOROVOD
from PIL import Image
from places import ROOT
from scipy.linalg import sqrtm
from tqdm import tqdm

from unitrain.communication.backend import backend_names
from unitrain.recipes import gan
from unitrain.recipes.generative.data import Digits, frechet_distance, independent_pixels

RECIPE = ROOT / "recipes" / "gan.py"
# Steps of 701 images and a last one of 35, in float64.
SHORT = (
    "--batch-size", "701", "--max-steps", "5", "--evaluate-every", "1", "--strategy.precision", "fp64",
    "--strategy.sync-batchnorm", "true", "--output-dir", "out",
)  # fmt: skip
STARTS = {
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node", "2"),
    "mpirun": ("mpirun", "--oversubscribe", "-np", "2", "python"),
}


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_it_is_short_and_names_no_backend() -> None:
    source = RECIPE.read_text()
    assert len(source.splitlines()) <= 150
    assert not re.search(rf"\b({'|'.join(backend_names())})\b", source)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of one process."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread stays for good
        monkeypatch.setattr(sys, "argv", ["gan.py", *SHORT])
        gan.main()
    return metrics_in(folder)


@pytest.mark.launcher
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("torchrun", "ddp", marks=pytest.mark.soak),
        pytest.param("torchrun", "fsdp", marks=pytest.mark.soak),  # test_conformance.py has several optimizers
        pytest.param("mpirun", "horovod", marks=[HOROVOD, pytest.mark.soak]),
    ],
)
def test_training_is_that_of_one_process(alone: list[dict[str, Any]], tmp_path: Path, name: str, backend: str) -> None:
    job = run_job([*STARTS[name], str(RECIPE), *SHORT, "--strategy.backend", backend], tmp_path)
    assert job.code == 0, job.output
    assert job.left == ()
    said = r"of 1437 other digits 0\.\d\d, of noise 7\.\d\d, of the generator's images \d\d\.\d\d$"
    assert re.search(said, job.stdout, re.MULTILINE), job.stdout
    with Image.open(tmp_path / "out" / "generated.png") as picture:
        assert picture.size == (8 * 34 + 2, 8 * 34 + 2)
    found = metrics_in(tmp_path)
    # Both optimizers make a step on each batch.
    assert [(line["step"], line["backend"]) for line in found] == [(6, backend), (10, backend)]
    for line, expected in zip(found, alone, strict=True):
        for value in ("g_loss", "d_loss", "frechet_distance"):
            assert line[value] == pytest.approx(expected[value], rel=1e-9), value


def test_a_latent_vector_is_drawn_with_its_sample() -> None:
    digits = Digits(training=True)
    image, latent = digits[3]
    assert (len(digits), len(Digits(training=False))) == (1437, 360)
    assert (image.shape, image.min(), image.max()) == ((1, 8, 8), -1, 1)
    assert not torch.equal(latent, digits[3][1])


def test_the_frechet_distance_is_the_formula_s() -> None:
    random = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(50, 1, 2, 3, generator=random), 2 + torch.rand(40, 1, 2, 3, generator=random)
    a, b = (images.flatten(1).double().numpy() for images in (ours, theirs))
    c, d = np.cov(a.T), np.cov(b.T)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(c + d - 2 * sqrtm(c @ d).real)
    assert frechet_distance(ours, theirs) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(ours, ours) == pytest.approx(0, abs=1e-9)


def test_noise_has_each_pixel_s_mean_and_deviation() -> None:
    digits = Digits(training=True).images
    noise = independent_pixels(digits, 20_000)
    assert torch.allclose(noise.mean(0), digits.mean(0), atol=0.05)
    assert torch.allclose(noise.std(0), digits.std(0), atol=0.05)
