"""Any rank of any world in this process, for what is arithmetic: it can't communicate, and says so."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from unitrain.config import StrategyConfig
from unitrain.data import Loader
from unitrain.data.sharding import MicroBatch
from unitrain.launch.detect import Launch
from unitrain.strategy import Strategy


class PretendedRank(Strategy):
    """A rank without the others."""

    name = "pretended"

    def _start(self) -> tuple[int, int]:
        return self.launch.rank, self.launch.world_size

    def _meet(self) -> None:
        """Meet nobody."""

    def _all_reduce(self, tensor: Tensor, op: str, name: str) -> NoReturn:
        raise AssertionError(f"{name} communicates")

    def _all_gather(self, tensor: Tensor, name: str) -> NoReturn:
        raise AssertionError(f"{name} communicates")

    def _broadcast(self, tensor: Tensor, src: int, name: str) -> NoReturn:
        raise AssertionError(f"{name} communicates")


def pretended_rank(rank: int = 0, world_size: int = 1, **settings: Any) -> PretendedRank:
    """Return a strategy that takes itself for one rank of many."""
    launch = Launch("spawn", rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    return PretendedRank(StrategyConfig(device="cpu", **settings), launch)


def handed_out(loader: Loader) -> MicroBatch:
    """Return the micro-batch that a loader has handed out last, as the training step sees it."""
    micro_batch = loader._strategy._training_step.micro_batch
    assert micro_batch is not None
    return micro_batch
