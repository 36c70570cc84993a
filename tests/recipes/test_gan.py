"""The GAN recipe's data and its score."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from unitrain.recipes.generative.data import Digits, frechet_distance


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
