"""The devices of a process: the type of its accelerator, and the devices of a model's layers.

A process has at most one type of accelerator, torch's current one: CUDA (or ROCm), XPU, MPS, NPU or another plug-in's.
``torch.get_device_module`` has its streams and generators, and for the rest ``torch.accelerator`` is used.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.errors import ConfigError, LaunchError
from unitrain.launch.detect import Launch

# Variables of vendors with which a launcher shows each process one device only, as srun --gpus-per-task=1 does.
_MASKS = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)  # fmt: skip
IN_STEP = ("cpu", "mps")
"""Types of devices that are used without streams: MPS has one queue, and the host's memory."""
HALF_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def devices_of(module: nn.Module) -> list[torch.device]:
    """Return the devices of a module's parameters, in the order of its layers; without meta, where nothing is."""
    return list(dict.fromkeys(parameter.device for parameter in module.parameters() if not parameter.is_meta))


def by_device(tensors: Iterable[Tensor]) -> Collection[list[Tensor]]:
    """Return tensors in lists of those on one device: torch's foreach kernels take no others."""
    lists: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        lists[tensor.device].append(tensor)
    return lists.values()


def accelerator() -> str | None:
    """Return the type of this process's accelerator, or None if no device of one is available."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def device_type(setting: str) -> str:
    """Return the type of device that the setting ``device`` means here.

    Args:
        setting: auto, cpu, or a type of accelerator, perhaps with an index.

    Raises:
        ConfigError: torch finds no such accelerator.
    """
    kind = accelerator()
    if setting in ("auto", "cpu"):
        return (kind or "cpu") if setting == "auto" else "cpu"
    if kind is None or setting.partition(":")[0] != kind:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        raise ConfigError(
            f"device is {setting!r}, but torch finds {f'devices of type {kind} only' if kind else 'no accelerator'} "
            f"(torch {torch.__version__}, CUDA_VISIBLE_DEVICES={visible}): use device cpu or auto."
        )
    return kind


def choices(setting: str) -> int:
    """Return how many accelerators this process may choose from: one if the setting names it, none for the CPU."""
    if setting in ("auto", accelerator()):
        return torch.accelerator.device_count()
    return int(":" in setting)


def pick_device(setting: str, launch: Launch) -> torch.device:
    """Return the device of this process: one accelerator for each local rank, or the CPU.

    The accelerator becomes torch's current one.

    Args:
        setting: ``auto`` (an accelerator, if there is one), ``cpu``, or a type of accelerator, perhaps with an index,
            such as ``cuda:1``. Without one, the local rank is the index among the visible accelerators.
        launch: how this process was started.

    Raises:
        ConfigError: there is no such device, or several ranks would train on devices without float64.
        LaunchError: there are fewer devices than processes on this host.
    """
    kind = device_type(setting)
    if kind == "cpu":
        return torch.device("cpu")
    visible = torch.accelerator.device_count()
    if ":" in setting:
        index = int(setting.split(":")[1])
        if index >= visible:
            raise ConfigError(f"device is {setting!r}, but only {kind}:0 to {kind}:{visible - 1} are visible.")
    elif launch.local_rank < visible:
        index = launch.local_rank
    # Each process then sees its device as number 0.
    elif visible == 1 and any(name in os.environ for name in _MASKS):
        index = 0
    else:
        raise LaunchError(
            f"local rank {launch.local_rank} has no device: {launch.launcher} started {launch.local_world_size} "
            f"processes on this host, with {visible} visible devices of type {kind}. Start fewer, or use device cpu."
        )
    # Libraries that are not told a device, NCCL among them, take the current one.
    torch.accelerator.set_device_index(index)
    device = torch.device(kind, index)
    if launch.world_size > 1 and precise(device) != device:
        raise ConfigError(f"{kind} has no float64, in which ranks add weights: train in one process, or on device cpu.")
    return device


def streams_of(device: torch.device) -> Any:
    """Return torch's module for a device that computes beside the host, in streams; None if it does not."""
    current = torch.accelerator.current_accelerator()
    runs_beside = current is not None and device.type == current.type and current.type not in IN_STEP
    return torch.get_device_module(device) if runs_beside else None


@lru_cache
def precise(device: torch.device) -> torch.device:
    """Return the device, or the CPU if the device has no float64, as MPS."""
    try:
        (torch.ones((), dtype=torch.float64, device=device) + 1).item()
    except (TypeError, RuntimeError):
        return torch.device("cpu")
    return device
