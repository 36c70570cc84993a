"""Saving and restoring the states of python's, numpy's and torch's generators."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from unitrain.rng import SeparateGenerators, generators_restored, seed_all, seed_generators

# Numpy's and torch's generators use half of the bits each.
TWO, THREE = 2 << 32 | 2, 3 << 32 | 3


def drawn(count: int = 3) -> list[float]:
    """Draw from each generator, normal numbers among them, which python and numpy make in pairs."""
    return [
        number
        for _ in range(count)
        for number in (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(())))
    ]


def fail() -> None:
    with generators_restored():
        seed_generators(TWO)
        drawn()
        raise KeyError


def test_they_are_restored_after_an_error() -> None:
    seed_all(1)
    expected = drawn()
    seed_all(1)
    with pytest.raises(KeyError):
        fail()
    assert drawn() == expected


def test_separate_generators_go_on_where_they_were_left() -> None:
    seed_all(1)
    expected = drawn()
    with generators_restored():
        seed_generators(TWO)
        own = drawn(6)
    seed_all(1)
    one, other = SeparateGenerators(TWO), SeparateGenerators(TWO)
    for separate in (one, other):
        parts: list[float] = []
        for count in (1, 2, 3):
            with separate.in_use():
                parts += drawn(count)
        assert parts == own
    assert drawn() == expected
