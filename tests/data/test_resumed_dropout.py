"""Dropout after a resume: every rank draws what it would have drawn in the run that was not interrupted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import Tensor, nn

import unitrain

SAVED_AT, KILLED_AT, END = 4, 5, 7


class Samples(torch.utils.data.Dataset[Tensor]):
    """Samples with noise."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(4) + index


def train(folder: str, backend: str, end: int, prepared_first: bool) -> tuple[list[float], list[float], list[float]]:
    """Return this rank's losses, its weights, and what its generators draw next."""
    with unitrain.init(backend=backend, device="cpu") as strategy:
        model: Any = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = strategy.dataloader(Samples(), global_batch_size=8, shuffle=True)
        test = strategy.dataloader(Samples(), global_batch_size=8)
        if prepared_first:
            model, optimizer = strategy.prepare(model, optimizer)
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer, loader=loader)
        checkpoint.resume()
        if not prepared_first:
            model, optimizer = strategy.prepare(model, optimizer)
        losses = []
        for _ in loader.epochs(9):
            for rows in loader:
                loss = model(rows).square().mean()
                strategy.step(loss, optimizer)
                losses.append(float(loss))
                if strategy.global_step == SAVED_AT:
                    checkpoint.save()
                if strategy.global_step == end:
                    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
                    return losses, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), drawn
            with strategy.evaluation(model):
                for rows in test:
                    model(rows)
    raise AssertionError("unreachable")


@pytest.mark.parametrize("prepared_first", [True, False], ids=["after prepare", "before prepare"])
@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=HOROVOD)])
def test_every_rank_goes_on_bit_for_bit(tmp_path: Path, backend: str, prepared_first: bool) -> None:
    def ranks(folder: str, end: int) -> list[Any]:
        return run_ranks(train, str(tmp_path / folder), backend, end, prepared_first)

    whole = ranks("whole", END)
    assert whole[0][0] != whole[1][0], "the ranks draw different numbers"
    ranks("parts", KILLED_AT)
    for (losses, *end), (expected, *expected_end) in zip(ranks("parts", END), whole, strict=True):
        assert losses == expected[SAVED_AT:]
        assert end == expected_end
