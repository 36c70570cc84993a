"""Chooses the device of a process, finds the devices of a model's layers, and names the half-precision dtypes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from unitrain.errors import ConfigError, LaunchError
from unitrain.launch.detect import Launch

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


def pick_device(setting: str, launch: Launch) -> torch.device:
    """Return the device of this process: one GPU for each local rank, or the CPU.

    Args:
        setting: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. ``auto`` takes a GPU if there is one.
        launch: its local rank is the index of the GPU among the visible ones.

    Raises:
        ConfigError: a GPU was requested and is not available.
        LaunchError: there are more processes on this host than visible GPUs.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device is {setting!r}, but torch finds no CUDA GPU (torch {torch.__version__}, "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}): use device cpu or auto."
        )
    visible = torch.cuda.device_count()
    if ":" in setting:
        index = int(setting.split(":")[1])
        if index >= visible:
            raise ConfigError(f"device is {setting!r}, but only cuda:0 to cuda:{visible - 1} are visible.")
    elif launch.local_rank < visible:
        index = launch.local_rank
    elif visible == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        index = 0  # the launcher shows each process one GPU only (srun --gpus-per-task=1)
    else:
        raise LaunchError(
            f"local rank {launch.local_rank} has no GPU: {launch.launcher} started {launch.local_world_size} processes "
            f"on this host, and {visible} GPUs are visible. Start at most {visible} processes per host, or use device "
            "cpu."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
