"""The backend data_parallel: one process, several GPUs, torch's DataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unitrain.communication.backend import LocalBackend
from unitrain.communication.structure import tensors
from unitrain.config import StrategyConfig
from unitrain.device import choices, device_type, devices_of
from unitrain.errors import ConfigError, UsageError
from unitrain.launch.detect import Launch
from unitrain.training.models.compile import is_compiled
from unitrain.wrapper import Wrapper


class _Wrapped(Wrapper, nn.DataParallel[nn.Module]):
    """torch's DataParallel, for models whose outputs can be gathered."""

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """Concatenate the outputs of the replicas on one device.

        Args:
            outputs: the outputs of the replicas, in order.
            output_device: the device of the result.

        Raises:
            UsageError: they contain a scalar to train on, the model's own loss.
        """
        # torch would return a vector with the loss of each replica, and only warn of it.
        if any(tensor.dim() == 0 and tensor.requires_grad for tensor in tensors(outputs, opened=True)):
            raise UsageError(
                "the model returns its own loss: DataParallel would make one per GPU, over parts of different sizes. "
                "Compute the loss from the model's outputs, or use backend ddp, one process per GPU."
            )
        return super().gather(outputs, output_device)


class DataParallelBackend(LocalBackend):
    """Splits each batch over the GPUs of one process and gathers the outputs on the first of them.

    On a CPU or a single GPU the model is not wrapped.
    """

    name = "data_parallel"

    @classmethod
    def replicas(cls, config: StrategyConfig) -> int:
        """Return the number of GPUs, or 1 on a CPU."""
        return len(_devices(config)) or 1

    @classmethod
    def check(cls, config: StrategyConfig, launch: Launch) -> None:
        """Refuse accelerators that are not available, or that DataParallel does not support.

        Raises:
            ConfigError: there is no such device, or it has no DataParallel.
        """
        kind = device_type(config.device)
        if kind not in ("cpu", "cuda") and choices(config.device) > 1:
            raise ConfigError(
                f"torch's DataParallel supports CUDA only, and device is {config.device!r}, of which there are "
                f"{choices(config.device)}: use backend ddp, or backend single with device {kind}:0."
            )

    def __init__(self, config: StrategyConfig, launch: Launch, device: torch.device) -> None:
        super().__init__(config, launch, device)
        self.devices: tuple[torch.device, ...] = _devices(config) or (device,)
        self.device: torch.device = self.devices[0]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # streams and events belong to the current device

    def place(self, module: nn.Module) -> None:
        """Move a module to the first device.

        Raises:
            UsageError: its layers are on several devices, and so can't be replicated.
        """
        spread = devices_of(module)
        if len(spread) > 1 and len(self.devices) > 1:
            raise UsageError(
                f"the model's layers are on {', '.join(map(str, spread))}, but DataParallel puts a whole replica on "
                "each GPU: build the model on one device, or use backend single or ddp, which leave it as it is."
            )
        super().place(module)

    def wrap_model(self, module: nn.Module) -> nn.Module:
        """Return the module in torch's DataParallel, or unchanged on a single device.

        Raises:
            UsageError: it is compiled, for one device only.
        """
        if len(self.devices) == 1:
            return module
        if is_compiled(module):
            raise UsageError(
                f"a compiled module can't be replicated on {len(self.devices)} devices: all would run the code "
                "compiled for one. Don't compile it (compile: false), or use backend ddp, one process per GPU."
            )
        return _Wrapped(module, list(self.devices), self.device)


def _devices(config: StrategyConfig) -> tuple[torch.device, ...]:
    """Return the GPUs that hold a replica: all visible ones, or the one that the setting ``device`` names.

    None if the CPU is used.
    """
    if device_type(config.device) != "cuda":
        return ()
    # A GPU that is named is the only one: CUDA_VISIBLE_DEVICES chooses several.
    if ":" in config.device:
        return (torch.device(config.device),)
    return tuple(torch.device("cuda", i) for i in range(torch.cuda.device_count()))
