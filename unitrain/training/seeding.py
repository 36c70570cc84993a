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


def seed_rank(*words: int) -> None:
    """Seed python, numpy and torch from several numbers, of which a rank is one, so that ranks draw apart."""
    seed_all(int(np.random.SeedSequence(words).generate_state(1)[0]))
