"""The networks of ``gan.py``: a small DCGAN (Radford et al. 2016) for images of 8x8 pixels."""

from __future__ import annotations

from torch import Tensor, nn

LATENT = 32
"""Numbers that the generator makes an image of."""


class Generator(nn.Module):
    """Makes images (rows, 1, 8, 8), with pixels from -1 to 1, of latent vectors (rows, LATENT)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: nn.Sequential = nn.Sequential(
            nn.Linear(LATENT, 128 * 2 * 2, bias=False),
            nn.Unflatten(1, (128, 2, 2)),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.ConvTranspose2d(128, 64, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, latent: Tensor) -> Tensor:
        """Return an image for each latent vector."""
        images: Tensor = self.layers(latent)
        return images


class Discriminator(nn.Module):
    """Tells real images (rows, 1, 8, 8) from generated ones: its logits are positive for those it takes for real.

    It has no BatchNorm, so that real and generated images can share a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers: nn.Sequential = nn.Sequential(
            nn.Conv2d(1, 64, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(64, 128, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(128 * 2 * 2, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return a logit for each image."""
        logits: Tensor = self.layers(images)
        return logits.squeeze(1)
