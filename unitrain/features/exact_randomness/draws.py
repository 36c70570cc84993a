"""The numbers that samples draw: hashes of their seeds, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unitrain.rng import GOLDEN, MULTIPLIERS

_SIGNED_GOLDEN, *_SIGNED = (int(value.view(np.int64)) for value in (GOLDEN, *MULTIPLIERS))


class SampleDraw:
    """Uniformly distributed numbers of one shape, a row for each sample.

    An element is a hash of its row's seed and of its place in each dimension. Padding at the end of a dimension
    thus leaves the elements before it as they are.
    """

    def __init__(self, seeds: Tensor, shape: Sequence[int]) -> None:
        self._seeds = seeds
        self._shape = shape

    def _bits(self, width: torch.dtype) -> Tensor:
        """Return integers of the given width with random bits."""
        parts = 8 // width.itemsize  # of a hash, each a number
        state, inner = self._seeds.clone(), self._shape[1:] or (1,)
        for i, size in enumerate(inner):
            count = -(-size // parts) if i == len(inner) - 1 else size
            places = torch.arange(1, count + 1, device=state.device) * _SIGNED_GOLDEN
            state = mix(state.unsqueeze(-1) + places)
        return state.view(width)[..., : inner[-1]].reshape(self._shape)

    def below(self, probability: float) -> Tensor:
        """Return which elements are below a probability."""
        if probability >= 1:  # its limit would not fit an int32
            return torch.ones(self._shape, dtype=torch.bool, device=self._seeds.device)
        return self._bits(torch.int32) < int(probability * 2**32) - 2**31

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """Return floats from 0, included, to 1, excluded, with as many bits as the dtype holds, at most 53."""
        if dtype == torch.float64:
            return ((self._bits(torch.int64) >> 11) & (2**53 - 1)).double() * 2.0**-53
        return ((self._bits(torch.int32) >> 8) & (2**24 - 1)).float() * 2.0**-24

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Return normally distributed floats.

        Box, Muller, "A note on the generation of random normal deviates" (Ann. Math. Stat. 29, 1958).
        """
        # The logarithm of 1 minus a uniform number, which is never 0.
        radius = (-2 * torch.log1p(-self.uniform(dtype))).sqrt()
        self._seeds = mix(self._seeds + _SIGNED_GOLDEN)
        return radius * torch.cos(2 * math.pi * self.uniform(dtype))


def mix(state: Tensor) -> Tensor:
    """Hash an int64 tensor in place, by the finaliser of ``mixed``. Its >> repeats the sign, which is masked out."""
    scratch = torch.empty_like(state)
    for shift, multiplier in ((30, _SIGNED[0]), (27, _SIGNED[1]), (31, 1)):
        torch.bitwise_right_shift(state, shift, out=scratch)
        state.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier != 1:
            state.mul_(multiplier)
    return state
