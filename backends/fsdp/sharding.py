"""``FSDPSharding``: which modules FSDP has sharded, and how the core reaches their weights and gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter

from unitrain.communication.sharding import Sharding
from unitrain.errors import UsageError

from .module import ShardedModule
from .shards import full_tensor, shards_of, to_local


class FSDPSharding(Sharding):
    """The modules that FSDP has sharded, and their parameters.

    Args:
        of_parameters: whether parameters are sharded: not in a world of one.
        replicas: how many ranks have the same shard.

    The objects that have sharded modules belong to these, so that a module is freed when the script drops it.

    Attributes:
        modules: for each sharded module, the object that has sharded it.
        module_of: for each sharded parameter, the object that has sharded its module.
        used: the parameters that backwards have used since the last step.
    """

    def __init__(self, *, of_parameters: bool, replicas: int) -> None:
        super().__init__(of_parameters=of_parameters, replicas=replicas)
        self.modules: WeakKeyDictionary[nn.Module, ref[ShardedModule]] = WeakKeyDictionary()
        self.module_of: dict[Tensor, ref[ShardedModule]] = {}
        self.used: set[Parameter] = set()

    def to_local(self, tensor: Tensor) -> Tensor:
        """Return this rank's shard."""
        return to_local(tensor)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return all of a tensor. Collective if it is sharded."""
        return full_tensor(tensor)

    def shard_like(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """Return a copy of this rank's shard of a whole tensor, or the tensor itself if the parameter is whole."""
        if not isinstance(parameter, DTensor):
            return tensor
        # Without a source, each rank takes its part of the tensor that it has, and nothing is sent.
        shard = distribute_tensor(tensor.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
        return shard.to(to_local(parameter).device, copy=True)

    def shards_of(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the shards of all ranks in order; of other ranks, tensors on the meta device."""
        return shards_of(tensor)

    def leaf(self, parameter: Parameter) -> Tensor:
        """Return FSDP's unsharded parameter."""
        module = self.module_of.get(parameter, lambda: None)()
        return parameter if module is None else module.leaf(parameter)

    def drop_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Drop the reduced gradients, and those that backwards have accumulated without reducing them."""
        for parameter in parameters:
            parameter.grad = self.leaf(parameter).grad = None
        self.used.difference_update(parameters)

    def copy_module(self, module: nn.Module) -> nn.Module:
        """Return a copy with whole weights. Collective.

        Raises:
            UsageError: the process group has been closed.
        """
        sharded = self.modules.get(module, lambda: None)()
        if sharded is None:
            return super().copy_module(module)
        if not dist.is_initialized():
            raise UsageError(
                "a sharded model's weights can't be gathered after strategy.close(): call export() before."
            )
        return sharded.copy()

    def existing(self) -> list[ShardedModule]:
        """Return the objects that have sharded the modules that exist."""
        return [sharded for reference in self.modules.values() if (sharded := reference()) is not None]

    def keep(self, parameters: Collection[Parameter]) -> None:
        """Forget all other parameters."""
        self.module_of = {p: module for p, module in self.module_of.items() if p in parameters}
        self.used.intersection_update(parameters)
