"""FLOPs of a model, and peak FLOP/s of devices: what MFU, the utilisation of a device by a model, is computed from."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from unitrain.data.structure import rebuilt, tensors
from unitrain.errors import UsageError

# Peaks in TFLOP/s, without sparsity: of bf16 and fp16, TF32, and fp32. From NVIDIA's data sheets, which may give those
# with sparsity, twice as high. A model's name has these words.
_PEAKS = {
    "B200": (2250.0, 1125.0, 75.0),
    "H200 NVL": (836.0, 418.0, 60.0),
    "H200": (989.0, 494.0, 67.0),
    "H100 NVL": (835.0, 417.0, 60.0),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100": (989.0, 494.0, 67.0),
    "A100": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.0, 91.6),
    "L4": (121.0, 60.0, 30.3),
    "A10": (125.0, 62.5, 31.2),
    "T4": (65.0, 8.1, 8.1),
}


def peak_flops(name: str, precision: str) -> float:
    """Return the peak FLOP/s of a device, given its name and the setting ``precision``; 0.0 if it is not known."""
    words = set(re.split(r"[ -]", name))
    peaks = next((peaks for model, peaks in _PEAKS.items() if words >= set(model.split())), None)
    if peaks is None or "MIG" in words or precision == "fp64":
        return 0.0
    if precision == "fp32":
        return 1e12 * peaks[1 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 2]
    return 1e12 * peaks[0]


def flops_per_sample(model: nn.Module, *inputs: Any, **options: Any) -> float:
    """Return the FLOPs of forward and backward for a sample, for ``strategy.throughput``.

    What counts is what ``torch.utils.flop_counter`` knows: matrix products, convolutions and attention; a
    multiplication and an addition are two. What activation checkpointing computes again does not belong to a model's
    FLOPs, so switch it on afterwards.

    The model runs on the meta device: nothing is computed, and it does not change.

    Args:
        model: the model, before ``prepare``.
        inputs: what it is called with: a batch, whose samples are the first dimension of the first tensor.
        options: named arguments of the call.

    Raises:
        UsageError: the model can't run on the meta device, since it looks at values.

    Example:
        >>> flops = flops_per_sample(model, images)
        >>> throughput = strategy.throughput(flops_per_sample=flops)
    """
    from torch.utils.flop_counter import FlopCounterMode  # few scripts need it

    def on_meta(value: Any) -> Any:
        return torch.empty_like(value, device="meta", requires_grad=value.requires_grad) if isinstance(value, Tensor) else value

    state = {name: on_meta(value) for name, value in chain(model.named_parameters(), model.named_buffers())}
    try:
        with FlopCounterMode(display=False) as counter:
            found = functional_call(model, state, rebuilt(inputs, on_meta), rebuilt(options, on_meta))
            trained = [value.sum() for value in tensors(found, opened=True) if value.requires_grad]
            if trained:
                torch.stack(trained).sum().backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(
            f"the FLOPs of {type(model).__name__} can't be counted on the meta device ({error}): pass the model as it was "
            "before prepare(), or pass throughput() a number of your own."
        ) from error
    return counter.get_total_flops() / len(next(tensors((inputs, options), opened=True)))
