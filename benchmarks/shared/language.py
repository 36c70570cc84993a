"""The language model of the recipes, trained by a strategy for some steps and validated in between."""

from __future__ import annotations

import time
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

import unitrain
from unitrain.recipes.text import data as text
from unitrain.recipes.text import gpt

CONTEXT, SEQUENCES, RATE, WARM_UP = 128, 16, 4e-3, 20


class LanguageModel:
    """A model of 3 blocks of a width, and AdamW with a constant learning rate after a warm-up.

    It is validated on the first ``windows`` windows of the held-out text.
    """

    def __init__(self, strategy: unitrain.Strategy, width: int, windows: int) -> None:
        self._strategy = strategy
        self._train, self._validation = _windows()
        self._validation = [tensor[:windows] for tensor in self._validation]
        net = gpt.GPT(text.VOCABULARY, CONTEXT, 3, width, 4, dropout=0.0)
        optimizer = torch.optim.AdamW(gpt.parameter_groups(net, 0.1), RATE, betas=(0.9, 0.95), fused=True)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP)
        self._model, self._optimizer, self._scheduler = strategy.prepare(net, optimizer, scheduler)

    def train(self, first: int, end: int) -> float:
        """Train from one step to another, and return the seconds that the slowest rank takes."""
        strategy = self._strategy
        strategy.barrier()
        start = time.perf_counter()
        for step in range(first, end):
            rows = torch.arange(SEQUENCES * step + strategy.rank, SEQUENCES * (step + 1), strategy.world_size)
            batch = [tensor[rows % len(tensor)] for tensor in self._train]
            strategy.step(self._loss(batch), self._optimizer, self._scheduler)
        return float(strategy.all_reduce(torch.tensor(time.perf_counter() - start), "max"))

    def validate(self) -> float:
        """Return the mean loss of the validation windows, with the weights that ranks share."""
        with self._strategy.evaluation(self._model):
            return self._loss(self._validation).item()

    def _loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = text.inputs_and_targets(*batch)
        return F.cross_entropy(self._model(inputs).flatten(0, 1), targets.flatten())


@cache
def _windows() -> tuple[list[Tensor], list[Tensor]]:
    """Return the training windows in a fixed random order, and the validation windows, with their lengths."""
    train, validation = (list(text.windows(part, CONTEXT).tensors) for part in text.load("docs"))
    order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(0))
    return [tensor[order] for tensor in train], validation
