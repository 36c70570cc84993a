"""Seeds: what all ranks draw alike, and what each draws for itself."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed python, numpy and torch. ``init`` does so alike on every rank: models and random splits come out equal."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_rank(seed: int, rank: int) -> None:
    """Let ranks draw apart from now on (dropout, say). Rank 0 goes on as one process would, and is left alone.

    The first ``prepare`` does so, once rank 0's weights are everybody's.
    """
    if rank > 0:
        seed_all(int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))
