"""Rollouts for ``ppo.py``: the steps of a policy in environments of Gymnasium, and the advantage of each action."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

from unitrain import ConfigError


class Rollout(NamedTuple):
    """The steps of some environments, a row for each step, and the return of each episode that ended."""

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    """Logarithms of the probabilities that the policy gave to the actions."""
    advantages: Tensor
    """Generalised advantage estimates of the actions."""
    targets: Tensor
    """The value function's: its own values and the advantages."""
    returns: Tensor
    """Sums of rewards, not discounted, a row for each episode."""


class Environments:
    """Environments of Gymnasium that step together, on one rank.

    A rollout begins with a reset, so that all of it follows from the policy, a seed and the environments' numbers: any
    rank may have any of them, and between rollouts nothing of them has to be saved.

    Args:
        name: the name by which Gymnasium makes the environment.
        numbers: the numbers of this rank's environments, among those of all ranks.

    Attributes:
        observation_size: size of an observation.
        actions: number of actions.

    Raises:
        ConfigError: there is no such environment, or its observations or actions are of another kind.
    """

    def __init__(self, name: str, numbers: Sequence[int]) -> None:
        make = partial(gymnasium.make, name, disable_env_checker=True)
        try:
            # By default, an environment would be reset in a step of its own, which is no transition.
            self._envs = SyncVectorEnv([make] * len(numbers), autoreset_mode=AutoresetMode.DISABLED)
        except gymnasium.error.Error as error:
            raise ConfigError(f"environment {name} can't be made: {error}") from error
        observations, actions = self._envs.single_observation_space, self._envs.single_action_space
        if not (isinstance(observations, Box) and len(observations.shape) == 1 and isinstance(actions, Discrete)):
            raise ConfigError(
                f"environment {name} has observations {observations} and actions {actions}, but the recipe's networks "
                "take a vector, and choose one of several actions: pass CartPole-v1 or Acrobot-v1, say."
            )
        self._numbers = numbers
        self.observation_size: int = observations.shape[0]
        self.actions: int = int(actions.n)

    def rollout(
        self, policy: nn.Module, steps: int, seed: Sequence[int], discount: float, gae_lambda: float,
        device: torch.device,
    ) -> Rollout:  # fmt: skip
        """Reset the environments, and let a policy act in them.

        Args:
            policy: returns logits of the actions, and values.
            steps: number of steps of each environment.
            seed: of this rollout.
            discount: factor of rewards one step later.
            gae_lambda: factor of the value function's errors one step later.
            device: the policy's.
        """
        generators = [np.random.default_rng((*seed, number)) for number in self._numbers]
        # The largest sum of a logit and noise of Gumbel's distribution has the probability that softmax gives it.
        noise = torch.tensor(np.stack([random.gumbel(size=(steps, self.actions)) for random in generators])).to(device)
        observation, _ = self._envs.reset(seed=[int(random.integers(2**31)) for random in generators])
        columns: list[list[Tensor]] = [[] for _ in range(6)]
        for step in range(steps):
            inputs = torch.tensor(observation, device=device)
            action = (policy(inputs)[0] + noise[:, step]).argmax(1)
            after, reward, terminal, truncated, _ = self._envs.step(action.cpu().numpy())
            last = terminal | truncated
            for column, value in zip(columns, (inputs, action, after, reward, terminal, last), strict=True):
                column.append(torch.as_tensor(value, device=device))
            observation = self._envs.reset(options={"reset_mask": last})[0] if last.any() else after
        # A row for each environment, and in it one for each step.
        observations, actions, following, rewards, terminated, ended = (torch.stack(column, 1) for column in columns)
        logits, values = policy(observations.flatten(0, 1))
        _, next_values = policy(following.flatten(0, 1))
        log_probs = logits.log_softmax(1).gather(1, actions.view(-1, 1)).view_as(actions)
        values, next_values = values.view_as(rewards), next_values.view_as(rewards)
        gains = advantages(rewards, values, next_values, terminated, ended, discount, gae_lambda)
        sums = [row.cumsum(0)[ends].diff(prepend=row.new_zeros(1)) for row, ends in zip(rewards, ended, strict=True)]
        dtype = torch.promote_types(values.dtype, torch.float32)  # rewards are float64
        return Rollout(
            observations.flatten(0, 1), actions.flatten(), log_probs.flatten(), gains.flatten().to(dtype),
            (gains + values).flatten().to(dtype), torch.cat(sums),
        )  # fmt: skip


def advantages(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, ended: Tensor, discount: float,
    gae_lambda: float,
) -> Tensor:  # fmt: skip
    """Return the generalised advantage estimates (Schulman et al. 2016). Tensors have a row for each environment.

    Args:
        rewards: of each step.
        values: of the observations before the steps.
        next_values: of those after them, the last ones of episodes included.
        terminated: whether the episode ended in a final state, and not because its time was over.
        ended: whether the episode ended.
        discount: factor of rewards one step later.
        gae_lambda: factor of the value function's errors one step later.
    """
    errors = rewards + discount * next_values * ~terminated - values
    estimates, later = torch.empty_like(errors), torch.zeros_like(errors[:, 0])
    for step in reversed(range(errors.shape[1])):
        later = errors[:, step] + discount * gae_lambda * later * ~ended[:, step]
        estimates[:, step] = later
    return estimates
