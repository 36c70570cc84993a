"""WGAN-GP: a critic with a gradient penalty makes three steps for each of the generator's."""

from __future__ import annotations

from typing import Any

import torch
from tiny import BATCH, data, net, random, sgd
from torch import Tensor
from torch.utils.data import TensorDataset

CRITIC_STEPS, EPOCHS = 3, 2


def samples() -> TensorDataset:
    """Return real samples, and the noise and the mixture that belong to each."""
    real, noise, _ = data(4, 2).tensors
    return TensorDataset(real, noise, random(len(real), 1).sigmoid())


def critic_loss(critic: Any, fake: Tensor, real: Tensor, mixture: Tensor) -> Any:
    between = (mixture * real + (1 - mixture) * fake).requires_grad_()
    [gradient] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    return critic(fake).mean() - critic(real).mean() + 10 * penalty


def train(strategy: Any) -> list[Any]:
    loader = strategy.dataloader(samples(), global_batch_size=BATCH)
    generator, critic = net(2, 5, 4), net(4, 5, 1)
    generator, critic, of_generator, of_critic = strategy.prepare(
        generator, critic, sgd(generator, lr=0.01), sgd(critic, lr=0.01)
    )
    number = 0
    for _ in loader.epochs(EPOCHS):
        for real, noise, mixture in loader:
            number += 1
            strategy.step(critic_loss(critic, generator(noise).detach(), real, mixture), of_critic)
            if number % CRITIC_STEPS == 0:
                strategy.step(-critic(generator(noise)).mean(), of_generator)
    return [generator, critic]
