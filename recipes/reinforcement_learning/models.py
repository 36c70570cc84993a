"""The networks of ``ppo.py``: a policy and a value function."""

from __future__ import annotations

from torch import Tensor, nn


class ActorCritic(nn.Module):
    """Two MLPs: the actor computes the logits of the actions, and the critic the value of the state.

    Args:
        observation_size: size of an observation.
        actions: number of actions.
        width: size of the two hidden layers of each.
    """

    def __init__(self, observation_size: int, actions: int, width: int = 64) -> None:
        super().__init__()
        self.actor: nn.Sequential = _mlp(observation_size, width, actions)
        self.critic: nn.Sequential = _mlp(observation_size, width, 1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the value for each row."""
        return self.actor(observations), self.critic(observations).squeeze(1)


def _mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    last = nn.Linear(width, outputs)
    # Small, so that all actions are about equally probable at first. Many implementations draw orthogonal weights, but
    # these depend on the number of threads, in their last digits.
    nn.init.normal_(last.weight, std=0.001)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), last)
