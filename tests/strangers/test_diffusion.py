"""Denoising diffusion, which draws time steps and noise in its forward: the same model on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unitrain

State = dict[str, Tensor]
STEPS = 50


class Diffusion(nn.Module):
    """Adds noise to images as DDPM does, and returns how badly a small network predicts it."""

    signal: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("signal", torch.cumprod(1 - torch.linspace(1e-4, 0.2, STEPS, dtype=torch.float64), 0))
        self.time = nn.Embedding(STEPS, 8)
        self.encode, self.decode = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        step = torch.randint(0, STEPS, (len(images),), device=images.device)
        noise = torch.randn_like(images)
        signal = self.signal[step][:, None, None, None]
        hidden = self.encode(signal.sqrt() * images + (1 - signal).sqrt() * noise) + self.time(step)[:, :, None, None]
        return nn.functional.mse_loss(self.decode(hidden.relu()), noise)


def trained(accumulate: int, exact: bool) -> tuple[list[float], State]:
    """Return the losses of the epochs, and the averaged weights."""
    strategy = unitrain.init(
        precision="fp64", device="cpu", clip_norm=1.0, accumulate=accumulate, exact_randomness=exact
    )
    with strategy:
        images = TensorDataset(
            torch.randn(44, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        )
        model = Diffusion()
        model, optimizer = strategy.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.99)))
        ema = strategy.ema(model, decay=0.9)
        train = strategy.dataloader(images, global_batch_size=16, shuffle=True)
        losses = []
        for _ in train.epochs(3):
            mean = strategy.meter()
            for (batch,) in train:
                loss = model(batch)
                mean.add(mean=loss, count=len(batch))
                strategy.step(loss, optimizer)
            losses.append(mean.value())
        return losses, strategy.export(ema).state_dict()


@pytest.mark.parametrize("exact", [True, False])
def test_noise_of_a_forward_belongs_to_the_sample_if_that_is_wanted(exact: bool) -> None:
    [(losses, weights)] = run_ranks(trained, 1, exact, nprocs=1)
    assert losses[-1] < losses[0]
    for accumulate in (1, 2):
        found, averaged = run_ranks(trained, accumulate, exact)[1]
        assert (found == pytest.approx(losses, rel=0, abs=1e-9)) == exact
        close = [torch.allclose(averaged[name], weight, rtol=0, atol=1e-9) for name, weight in weights.items()]
        assert all(close) == exact
