"""Compression of tensors on their way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """Changes tensors before they are reduced, and back; not at all unless a subclass overrides this."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send for one, and an argument for ``decompress``."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return a result in its original form, given the argument that ``compress`` has returned."""
        return tensor


NoneCompressor = Compressor


class FP16Compressor(Compressor):
    """Reduces floats in 16 bits, sums included."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor in float16 if it has floats, and its dtype."""
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return the tensor in the dtype that it had."""
        return tensor.to(ctx)


class Compression:
    """The compressions that there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
