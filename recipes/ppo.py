r"""Train a policy by PPO in environments of Gymnasium: the same policy under every launcher.

    python recipes/ppo.py
    torchrun --nproc-per-node 2 recipes/ppo.py
    mpirun -np 2 python recipes/ppo.py
    horovodrun -np 2 python recipes/ppo.py
    srun -n 2 python recipes/ppo.py

It balances a pole on a cart (CartPole-v1): no GPU, half a minute. --help lists all flags.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unitrain
from unitrain import ConfigError, Meter, Section, parse_command_line
from unitrain.recipes.reinforcement_learning.models import ActorCritic
from unitrain.recipes.reinforcement_learning.rollouts import Environments
from unitrain.recipes.shared.run_folder import RunFolder, resume_or_discard, summarise

# Settings that may change when a run is resumed, because results don't depend on them.
MAY_CHANGE = {"strategy", "output_dir", "resume", "force"}


class Settings(Section):
    """The recipe's settings; each is a flag, and a key in the file passed to --config."""

    environment: str = "CartPole-v1"
    """Gymnasium's name of an environment that observes a vector, and has a number of actions to choose from."""
    environments: Annotated[int, Field(ge=1)] = 8
    """Number of environments, over all processes."""
    rounds: Annotated[int, Field(ge=1)] = 20
    """Number of rollouts, each of which is trained on."""
    steps: Annotated[int, Field(ge=1)] = 512
    """Steps of each environment in a rollout, from a reset on: more than an episode has."""
    epochs: Annotated[int, Field(ge=1)] = 10
    """Passes over a rollout."""
    batch_size: Annotated[int, Field(ge=1)] = 256
    """Steps of environments per optimizer step, over all processes."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate of Adam at the beginning; it decreases to 0."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Factor of rewards one step later."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Factor of the value function's errors one step later, in the estimates of advantages."""
    clip: Annotated[float, Field(gt=0)] = 0.2
    """Largest change of an action's probability that is rewarded, as a fraction of it."""
    value_weight: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the value function's loss."""
    entropy_weight: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the entropy of the actions, which rewards exploration."""
    output_dir: Path | None = None
    """Folder of the results and checkpoints; a run in it is resumed. null creates a new one in runs/."""
    resume: str = "auto"
    """auto: from the newest checkpoint in output-dir, if any; never: from the beginning; or a checkpoint's PATH."""
    force: bool = False
    """Resume even if settings have changed since the checkpoint."""
    strategy: unitrain.StrategyConfig = unitrain.StrategyConfig(clip_norm=0.5)


def normalised(strategy: unitrain.Strategy, advantages: Tensor) -> Tensor:
    """Return advantages with mean 0 and variance 1 over the minibatches of all ranks. Collective."""
    mean, square = strategy.mean(torch.stack([advantages.mean(), advantages.square().mean()])).unbind()
    return (advantages - mean) / ((square - mean.square()).clamp(min=0).sqrt() + 1e-8)


def losses_of(policy: nn.Module, batch: list[Tensor], clip: float) -> dict[str, Tensor]:
    """Return the parts of PPO's loss, each a mean over the minibatch."""
    observations, actions, log_probs, advantages, targets = batch
    logits, values = policy(observations)
    log_policy = logits.log_softmax(1)
    ratio = (log_policy.gather(1, actions[:, None])[:, 0] - log_probs).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return {
        "policy_loss": -torch.minimum(ratio * advantages, clipped * advantages).mean(),
        "value_loss": F.mse_loss(values, targets),
        "entropy": -(log_policy.exp() * log_policy).sum(1).mean(),
    }


def main() -> None:
    """Let the policy act in the environments, train it on what it did, and again."""
    settings = parse_command_line(Settings, sys.argv[1:], prog="ppo.py", description="Train a policy by PPO.")
    strategy = unitrain.init(settings.strategy)
    if settings.environments < strategy.world_size:
        raise ConfigError(
            f"environments is {settings.environments}, but there are {strategy.world_size} processes, and each needs "
            "one: pass more as --environments, or start fewer processes."
        )
    if strategy.config.accumulate > 1:
        raise ConfigError("PPO normalises advantages over a whole minibatch: set strategy.accumulate to 1.")
    numbers = np.array_split(np.arange(settings.environments), strategy.world_size)[strategy.rank]
    environments = Environments(settings.environment, numbers.tolist())

    policy = ActorCritic(environments.observation_size, environments.actions)
    optimizer = torch.optim.Adam(policy.parameters(), settings.lr, eps=1e-5, fused=True)
    batches = math.ceil(settings.environments * settings.steps / settings.batch_size)
    last_step = settings.rounds * settings.epochs * batches
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / last_step)
    policy, optimizer, scheduler = strategy.prepare(policy, optimizer, scheduler)

    folder = RunFolder(strategy, settings.output_dir, "ppo")
    summarise(strategy, settings.batch_size)
    progress = {"rounds": 0}
    checkpoint = strategy.checkpoint(
        folder.path / "checkpoints", config=settings.model_dump(mode="json", exclude=MAY_CHANGE),
        partial=True,  # has no loader, since each round makes another
        policy=policy, optimizer=optimizer, scheduler=scheduler, progress=progress,
    )  # fmt: skip
    resume_or_discard(checkpoint, settings.resume, force=settings.force)
    folder.begin(settings, strategy.global_step)
    for number in range(progress["rounds"], settings.rounds):
        with checkpoint.round():  # signals wait for its end, since half a rollout can't be resumed
            with strategy.evaluation(policy), strategy.autocast():
                rollout = environments.rollout(
                    policy, settings.steps, (strategy.config.seed, number), settings.discount, settings.gae_lambda,
                    strategy.device,
                )  # fmt: skip
            # Each rank gets the steps of all, in the order of the environments: minibatches don't depend on the ranks.
            *steps, returns = strategy.gather(tuple(rollout))
            train = strategy.dataloader(TensorDataset(*steps), global_batch_size=settings.batch_size, shuffle=True)
            train.epoch = number * settings.epochs  # which the order follows from
            meters: defaultdict[str, Meter] = defaultdict(strategy.meter)
            for _ in train.epochs((number + 1) * settings.epochs):
                for observations, actions, log_probs, advantages, targets in train:
                    gains = normalised(strategy, advantages)
                    with strategy.autocast():
                        losses = losses_of(policy, [observations, actions, log_probs, gains, targets], settings.clip)
                    for name, value in losses.items():
                        meters[name].add(mean=value, count=len(actions))
                    loss = losses["policy_loss"] + settings.value_weight * losses["value_loss"]
                    strategy.step(loss - settings.entropy_weight * losses["entropy"], optimizer, scheduler)
            metrics = {
                "round": number, "step": strategy.global_step, "episodes": len(returns),
                "mean_return": returns.mean().item() if len(returns) else math.nan,
                **{name: meter.value() for name, meter in meters.items()},
            }  # fmt: skip
            folder.add(metrics)
            strategy.print("round {round}: mean return {mean_return:.1f}, entropy {entropy:.3f}".format(**metrics))
            progress["rounds"] = number + 1
        checkpoint.save()
    strategy.save(policy, folder.path / "model.pt")
    if strategy.is_main:
        from unitrain.recipes.shared.figures import draw_curves  # takes as long to import as torch

        draw_curves(folder.path, {"mean return": ["mean_return"], "entropy": ["entropy"]}, by="round")
    folder.close()
    strategy.print(f"results are in {folder.path}")
    strategy.close()


if __name__ == "__main__":
    main()
