"""Data and score of ``gan.py``: scikit-learn's digits with latent vectors, and the Fréchet distance between images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from unitrain.recipes.generative.models import LATENT


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """scikit-learn's digits as images (1, 8, 8) from -1 to 1, each with a latent vector to generate another of.

    A latent vector is drawn where its image is read, from random numbers of the sample's own. So it does not depend on
    the number of processes.

    Args:
        training: whether to have every sample but each fifth, or each fifth.
    """

    def __init__(self, *, training: bool) -> None:
        from sklearn.datasets import load_digits

        pixels = torch.from_numpy(load_digits().data).float().view(-1, 1, 8, 8) / 8 - 1  # they are 0 to 16
        fifth = torch.arange(len(pixels)) % 5 == 0
        self.images: Tensor = pixels[~fifth if training else fifth]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], torch.randn(LATENT)


def frechet_distance(images: Tensor, others: Tensor) -> float:
    """Return the Fréchet distance between normal distributions with the mean and covariance of each set's pixels.

    It is 0 for the same images. The Fréchet inception distance (Heusel et al. 2017) is this between features of a
    network; 8x8 pixels are few enough to be compared themselves.
    """
    (mean, covariance), (other_mean, other_covariance) = (_moments(images), _moments(others))
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # The trace of the square root of the product of both covariances.
    shared = torch.linalg.eigvalsh(root @ other_covariance @ root).clamp(min=0).sqrt().sum()
    apart = (mean - other_mean).square().sum()
    return float(apart + covariance.trace() + other_covariance.trace() - 2 * shared)


def _moments(images: Tensor) -> tuple[Tensor, Tensor]:
    rows = images.flatten(1).double().cpu()
    return rows.mean(0), rows.T.cov()


def independent_pixels(images: Tensor, count: int) -> Tensor:
    """Return images of noise, each pixel with the mean and deviation that it has in ``images``."""
    noise = torch.randn(count, *images.shape[1:], generator=torch.Generator().manual_seed(0))
    return images.mean(0) + noise * images.std(0)
