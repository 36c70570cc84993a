"""One process, several GPUs: torch's DataParallel."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from unitrain.config import StrategyConfig
from unitrain.errors import ConfigError
from unitrain.launching.launch import Launch
from unitrain.strategy import SoleStrategy


class _Wrapped(nn.DataParallel[nn.Module]):
    """torch's wrapper, whose deep copy (an average of the weights, say) is one of the user's module alone."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)


class DataParallelStrategy(SoleStrategy):
    """Splits each batch over the GPUs of one process and gathers the outputs on one of them.

    Without GPUs, or with one, the model is not wrapped: there is nothing to split.
    """

    name = "data_parallel"

    @classmethod
    def check(cls, config: StrategyConfig, launch: Launch) -> None:
        """Refuse GPUs that are not there, and BatchNorm over replicas, which torch's DataParallel can't do."""
        devices = _devices(config)
        if len(devices) > 1 and config.sync_batchnorm:
            raise ConfigError(
                f"sync_batchnorm can't be honoured by backend data_parallel over {len(devices)} devices: its replicas "
                "normalise apart. Use backend ddp, one process for each GPU (torchrun --nproc-per-node "
                f"{len(devices)} ...)."
            )

    def _start(self) -> tuple[int, int]:
        self.devices = _devices(self.config) or (self.device,)
        self.device = self.devices[0]
        return super()._start()

    def _wrap_model(self, module: nn.Module) -> nn.Module:
        if len(self.devices) == 1:
            return module
        output = self.config.data_parallel.output_device
        return _Wrapped(module, list(self.devices), self.device if output is None else output)


def _devices(config: StrategyConfig) -> tuple[torch.device, ...]:
    """Return the GPUs that hold a replica: none where the CPU is used."""
    visible = 0 if config.device == "cpu" else torch.cuda.device_count()
    wanted = config.data_parallel.device_ids
    if wanted is None:
        if ":" in config.device:
            return (torch.device(config.device),)
        return tuple(torch.device("cuda", i) for i in range(visible))
    missing = [i for i in wanted if i >= visible]
    if missing or not wanted or len(set(wanted)) != len(wanted):
        raise ConfigError(
            f"data_parallel.device_ids is {list(wanted)}, but must name different GPUs of the {visible} visible ones."
        )
    output = config.data_parallel.output_device
    if output is not None and output not in wanted:
        raise ConfigError(f"data_parallel.output_device is {output}, but must be one of device_ids {list(wanted)}.")
    return tuple(torch.device("cuda", i) for i in wanted)
