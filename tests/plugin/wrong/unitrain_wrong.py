"""Backends that are wrong, each in one way that an author of a backend can be wrong in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from unitrain_store import StoreBackend


class _Reducing(StoreBackend):
    """Reduces what was gathered right, however wrong ``all_gather`` and ``reduced`` are made."""

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Callable[[], None]:
        gather = StoreBackend.all_gather(self, tensor, name)

        def finish() -> None:
            tensor.copy_(self.reduced(gather(), op))

        return finish

    def reduced(self, everyone: Tensor, op: str) -> Tensor:
        return everyone.sum(0) if op == "sum" else everyone.amax(0) if op == "max" else everyone.amin(0)


class SumsTwice(_Reducing):
    name = "sums_twice"

    def reduced(self, everyone: Tensor, op: str) -> Tensor:
        return super().reduced(everyone, op) * (self.world_size if op == "sum" else 1)


class MaxIsSum(_Reducing):
    name = "max_is_sum"

    def reduced(self, everyone: Tensor, op: str) -> Tensor:
        return super().reduced(everyone, "sum" if op == "max" else op)


class DropsARankOfReductions(_Reducing):
    name = "drops_a_rank_of_reductions"

    def reduced(self, everyone: Tensor, op: str) -> Tensor:
        return super().reduced(everyone[:-1], op)


class DropsARankOfGradients(StoreBackend):
    """Reduces right in its self-test, and trains another model."""

    name = "drops_a_rank_of_gradients"

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Callable[[], None]:
        if self.rank == 1 and name.startswith("gradients"):
            tensor.zero_()
        return super().all_reduce(tensor, op, name)


class LacksHalfTypes(_Reducing):
    name = "lacks_half_types"

    def reduced(self, everyone: Tensor, op: str) -> Tensor:
        if everyone.dtype in (torch.float16, torch.bfloat16):
            raise KeyError(everyone.dtype)
        return super().reduced(everyone, op)


class RoundsApart(_Reducing):
    """Each rank adds the others' tensors to its own, as a ring of ranks does that lets each finish by itself."""

    name = "rounds_apart"

    def reduced(self, everyone: Tensor, op: str) -> Tensor:
        if op != "sum":
            return super().reduced(everyone, op)
        total = torch.zeros_like(everyone[0])
        for one in everyone.roll(self.rank, 0):
            total += one
        return total


class ReducesACopy(StoreBackend):
    name = "reduces_a_copy"

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Callable[[], None]:
        return super().all_reduce(tensor.clone(), op, name)


class DropsARankOfGathers(_Reducing):
    name = "drops_a_rank_of_gathers"

    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        gather = super().all_gather(tensor, name)
        return lambda: gather()[:-1]


class GathersInAnyOrder(_Reducing):
    name = "gathers_in_any_order"

    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        gather = super().all_gather(tensor, name)
        return lambda: gather().roll(self.rank, 0)


class BroadcastsFromRank0(StoreBackend):
    name = "broadcasts_from_rank_0"

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Callable[[], None]:
        return super().broadcast(tensor, 0, name)


class StartsTheOtherWayRound(StoreBackend):
    name = "starts_the_other_way_round"

    def start(self) -> Any:
        rank, world_size = super().start()
        return world_size, rank


class CalledOtherwise(StoreBackend):
    name = "called_something_else"


class NoBackend:
    name = "no_backend"


class LosesItsCable(StoreBackend):
    """Fails by itself in a user's call, on rank 1: no other rank has ended."""

    name = "loses_its_cable"

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Callable[[], None]:
        if self.rank == 1 and name == "all_reduce.max":
            raise RuntimeError("the cable is loose")
        return super().all_reduce(tensor, op, name)
