"""A training loop with each framework, written as in its guide, in two styles.

``plain`` is forward, loss, backward, step. ``full`` accumulates over ``ACCUMULATE`` micro-batches, clips the gradients'
norm to ``CLIP_NORM``, and computes mean loss and accuracy over all ranks, which it reads once per run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

ACCUMULATE = 4
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        model: the model that it trains.
        run: trains for a number of optimizer steps.
    """

    model: nn.Module
    run: Callable[[int], None]
