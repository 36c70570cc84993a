"""A language model that writes texts after each epoch, until they have stopped getting better."""

from __future__ import annotations

from typing import Any

import torch
from tiny import BATCH, ROWS, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import TensorDataset

END, PADDING, LENGTH, EPOCHS, PATIENCE = 0, -100, 5, 40, 2


def texts() -> TensorDataset:
    """Return texts that count down to the end, from 1 to 4; each is a prompt, and what follows its tokens."""
    torch.manual_seed(3)
    tokens = torch.randint(1, LENGTH, (ROWS, 1)) - torch.arange(LENGTH)
    return TensorDataset(tokens.clamp(min=END), tokens[:, 1:].where(tokens[:, 1:] >= END, PADDING))


def language_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(LENGTH, 4), nn.Linear(4, LENGTH)).double()


def loss_of(model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), following.flatten(), ignore_index=PADDING)


def generate(model: nn.Module, tokens: Tensor, strategy: Any) -> Tensor:
    running = torch.ones(len(tokens), dtype=torch.bool)
    while strategy.all_reduce(running.any(), "max") and tokens.shape[1] < LENGTH:
        following = model(tokens)[:, -1].argmax(1).where(running, END)
        tokens = torch.cat([tokens, following[:, None]], 1)
        running &= following != END
    return pad(tokens, (0, LENGTH - tokens.shape[1]), value=END)


def train(strategy: Any) -> list[Any]:
    loader = strategy.dataloader(texts(), global_batch_size=BATCH)
    prompts = strategy.dataloader(texts(), global_batch_size=BATCH)
    model = language_model()
    model, optimizer = strategy.prepare(model, sgd(model, lr=1.0))
    best = {"accuracy": 0.0, "epochs_since": 0}
    checkpoint = strategy.checkpoint("runs/generation", model=model, optimizer=optimizer, loader=loader, best=best)
    checkpoint.resume()
    for _ in loader.epochs(EPOCHS):
        if best["epochs_since"] >= PATIENCE:
            break
        for tokens, following in loader:
            weight = (following != PADDING).sum()
            strategy.step(loss_of(model, tokens, following), optimizer, weight=weight)
        with strategy.evaluation(model):
            parts = []
            for tokens, _ in prompts:
                written = generate(model, tokens[:, :1], strategy)
                parts.append(strategy.gather((written == tokens).all(1), in_order=prompts))
        accuracy = float(torch.cat(parts).double().mean())
        improved = accuracy > best["accuracy"]
        best.update(accuracy=max(accuracy, best["accuracy"]), epochs_since=0 if improved else best["epochs_since"] + 1)
        checkpoint.save(best=improved)
    checkpoint.resume("best")
    return [model, best["accuracy"]]
