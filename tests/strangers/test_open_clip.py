"""open_clip's model and loss in its training loop, ported by the page on contrastive losses: the same weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset

import unitrain

PAIRS, BATCH, EPOCHS = 22, 8, 2


def parts() -> tuple[TensorDataset, Any, Any, Any]:
    """Return the data, a tiny CLIP, its loss, and the optimizer that open_clip makes."""
    library: Any = import_module("open_clip")
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(PAIRS, 3, 16, 16, generator=generator, dtype=torch.float64)
    data = TensorDataset(images, torch.randint(1, 50, (PAIRS, 8), generator=generator))
    torch.manual_seed(0)
    vision = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16}
    text = {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
    model = library.CLIP(embed_dim=8, vision_cfg=vision, text_cfg=text).double()
    plain = [p for p in model.parameters() if p.ndim < 2]
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.2}]
    return data, model, library.ClipLoss(), torch.optim.AdamW(groups, lr=1e-3)


def original() -> dict[str, torch.Tensor]:
    """Train as open_clip's main.py does on one process."""
    data, model, criterion, optimizer = parts()
    for _ in range(EPOCHS):
        for images, texts in DataLoader(data, BATCH, drop_last=True):
            optimizer.zero_grad()
            criterion(*model(images, texts)).backward()
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, 4.6052)
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def ported(backend: str) -> dict[str, torch.Tensor]:
    data, model, criterion, optimizer = parts()
    with unitrain.init(backend=backend, device="cpu", precision="fp64") as strategy:
        model, optimizer = strategy.prepare(model, optimizer)
        plain: Any = strategy.unwrap(model)
        train = strategy.dataloader(data, global_batch_size=BATCH, drop_last=True)
        for _ in train.epochs(EPOCHS):
            for images, texts in train:
                image_features, text_features, scale = model(images, texts)
                features = strategy.gather((image_features, text_features), differentiable=True)
                strategy.step(criterion(*features, scale), optimizer)
                with torch.no_grad():
                    plain.logit_scale.clamp_(0, 4.6052)
        return strategy.export(model).state_dict()


@pytest.mark.all("test_contrastive.py trains with such a loss")
@pytest.mark.parametrize(
    ("backend", "launcher", "nprocs"),
    [pytest.param("ddp", "spawn", 3, marks=pytest.mark.soak), pytest.param("horovod", "horovodrun", 2, marks=HOROVOD)],
)
def test_open_clip(backend: str, launcher: Any, nprocs: int) -> None:
    pytest.importorskip("open_clip")
    [expected] = run_ranks(original, nprocs=1, timeout=120)
    for state in run_ranks(ported, backend, nprocs=nprocs, launcher=launcher, timeout=120):
        for name, theirs in expected.items():
            # The order of the rows is that of the ranks, which only rounding shows.
            torch.testing.assert_close(state[name], theirs, rtol=0, atol=1e-9)
