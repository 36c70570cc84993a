"""denoising-diffusion-pytorch, which draws times and noise in its forward: the same weights on any number of ranks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset

import unitrain

IMAGES, BATCH, STEPS_OF_NOISE = 18, 4, 10


def parts() -> tuple[TensorDataset, Any, Any]:
    """Return images with a time and noise for each, a tiny diffusion model, and its Trainer's optimizer."""
    library: Any = import_module("denoising_diffusion_pytorch")
    torch.set_default_dtype(torch.float64)  # it embeds times in this
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(IMAGES, 3, 8, 8, generator=generator)
    times = torch.randint(STEPS_OF_NOISE, (IMAGES,), generator=generator)
    data = TensorDataset(images, times, torch.randn(images.shape, generator=generator))
    torch.manual_seed(0)
    unet = library.Unet(dim=8, dim_mults=(1, 2), attn_dim_head=4, attn_heads=2)
    model = library.GaussianDiffusion(unet, image_size=8, timesteps=STEPS_OF_NOISE)
    return data, model, torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99))


def original() -> dict[str, torch.Tensor]:
    """Train as its Trainer does on one process, with gradient_accumulate_every=2."""
    data, model, optimizer = parts()
    batches = iter(DataLoader(data, BATCH // 2, drop_last=True))
    for _ in range(IMAGES // BATCH):
        for _ in range(2):
            images, times, noise = next(batches)
            (model(images, times=times, noise=noise) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def ported(drawn_before: bool) -> dict[str, torch.Tensor]:
    data, model, optimizer = parts()
    settings: Any = {"device": "cpu", "precision": "fp64", "clip_norm": 1.0, "accumulate": 2}
    with unitrain.init(exact_randomness=not drawn_before, **settings) as strategy:
        model, optimizer = strategy.prepare(model, optimizer)
        for images, times, noise in strategy.dataloader(data, global_batch_size=BATCH, drop_last=True):
            given = {"times": times, "noise": noise} if drawn_before else {}
            strategy.step(model(images, **given), optimizer)
        return strategy.export(model).state_dict()


@pytest.mark.all("test_timm.py ports another loop with an average of weights")
@pytest.mark.parametrize("drawn_before", [True, False])
def test_diffusion(drawn_before: bool) -> None:
    pytest.importorskip("denoising_diffusion_pytorch")
    reference, arguments = (original, ()) if drawn_before else (ported, (False,))
    [expected] = run_ranks(reference, *arguments, nprocs=1, timeout=120, fresh=True)
    for state in run_ranks(ported, drawn_before, timeout=120, fresh=True):
        for name, theirs in expected.items():
            torch.testing.assert_close(state[name], theirs, rtol=0, atol=1e-9, check_dtype=False)  # fp64 casts buffers
