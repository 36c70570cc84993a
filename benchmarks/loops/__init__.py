"""One training loop for each framework, as its own guide writes it: bare, and with what a real one has besides.

``plain`` is forward, loss, backward, step. ``full`` accumulates over ``ACCUMULATE`` micro-batches, clips the gradients'
norm to ``CLIP_NORM``, and keeps the mean loss and the accuracy over all ranks, which it reads once for each run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

ACCUMULATE = 4
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Loop:
    """A loop that is ready to run.

    Attributes:
        model: whose weights it trains.
        run: does so many optimizer steps.
    """

    model: nn.Module
    run: Callable[[int], None]
