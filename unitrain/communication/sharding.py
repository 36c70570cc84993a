"""``Sharding``: which tensors are divided among the ranks, and how to reach their parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeGuard

from torch import Tensor, nn
from torch.nn import Parameter

from unitrain.errors import UsageError
from unitrain.module_copy import copied


class Sharding:
    """The division of parameters, or of the state of optimizers, among the ranks.

    Base class for backends that shard parameters, as FSDP does; these override the methods, which do nothing here. All
    other backends use this class as it is.

    Args:
        of_parameters: whether each rank has a part of each parameter (a shard).
        replicas: number of ranks that have the same shard.

    Attributes:
        any: whether parameters or the state of optimizers are sharded.
        of_optimizers: whether each rank has the optimizer's state of some parameters only.
        owners: the ranks that have the states of parameters, if optimizers are sharded.
    """

    def __init__(self, *, of_parameters: bool = False, replicas: int = 1) -> None:
        self.of_parameters: bool = of_parameters
        self.of_optimizers: bool = False
        self.any: bool = of_parameters
        self.replicas: int = replicas
        self.owners: dict[Parameter, int] = {}

    def divide_optimizers(self) -> None:
        """Note that each rank has the optimizer's state of some parameters only, those that ``owners`` gives it."""
        self.of_optimizers = self.any = True

    def is_sharded(self, value: object) -> TypeGuard[Tensor]:
        """Return whether a value is a sharded tensor."""
        return self.any and isinstance(value, Tensor) and self.to_local(value) is not value

    def to_local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a parameter, a gradient or an optimizer's state. It shares the tensor's memory."""
        return tensor

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return all of such a tensor. Collective if it is sharded."""
        return tensor

    def shard_like(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """Return the shard of a whole tensor, the same on all ranks, that this rank has of a parameter."""
        return tensor

    def shards_of(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return tensors that make up such a tensor, one after the other in its first dimension.

        Those that this rank has share its memory. The others are on the meta device.
        """
        return (tensor,)

    def leaf(self, parameter: Parameter) -> Tensor:
        """Return the leaf of the graph that gets the local gradient of a parameter; the same one in all steps."""
        return parameter

    def drop_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Drop all gradients of parameters, including those that were not reduced yet."""
        for parameter in parameters:
            parameter.grad = None

    def copy_module(self, module: nn.Module) -> nn.Module:
        """Return a deep copy of a module as ``wrap_model`` got it, with its weights of now. Collective if sharded."""
        return copied(module)


def divided(parameters: Iterable[Parameter], sizes: list[int]) -> dict[Parameter, int]:
    """Return the part of each parameter: the largest first, each to the smallest part. Add to the parts' elements."""
    part_of = {}
    # Largest first, so that small ones can fill what these leave uneven.
    for parameter in sorted(parameters, key=lambda p: (not p.requires_grad, -p.numel())):  # frozen ones have no state
        part_of[parameter] = smallest = sizes.index(min(sizes))
        sizes[smallest] += parameter.numel()
    return part_of


class OwnedBy:
    """Stands, in the state dict of an optimizer, for the state of a parameter that another rank updates.

    It can't be copied, pickled or loaded: what is made of it would lose the state, which ``rank`` has, if it has any.
    """

    def __init__(self, rank: int) -> None:
        self.rank: int = rank

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled and copied."""
        refuse()

    def __iter__(self) -> NoReturn:
        """Refuse to be loaded by an optimizer, which looks for tensors in it."""
        refuse()

    def __repr__(self) -> str:
        """Return the rank."""
        return f"OwnedBy({self.rank})"


def refuse() -> NoReturn:
    """Raise UsageError: a copy would lose the state that other ranks own."""
    raise UsageError("each rank has only a part of this optimizer's state: use strategy.checkpoint or strategy.save.")
