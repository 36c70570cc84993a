"""Stands in for any rank of any world in this process. It can't communicate, and raises an error if asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from unitrain.communication.backend import Backend
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.data import Loader
from unitrain.data.order.sharding import MicroBatch
from unitrain.data.order.shares import reduced
from unitrain.job.watch.boundaries import Boundaries
from unitrain.job.watch.stopping import Stopping
from unitrain.launch.detect import Launch
from unitrain.training.loop.loop import TrainingLoop
from unitrain.training.loop.sockets import Sockets
from unitrain.training.loop.step import TrainingStep
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.windows.weights import Losses

T = TypeVar("T")
CPU = torch.device("cpu")


class _Mute(Backend):
    name = "mute"

    def start(self) -> NoReturn:
        raise AssertionError("a pretended rank starts nothing")

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> NoReturn:
        raise AssertionError(f"{name} communicates")

    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        raise AssertionError(f"{name} communicates")

    def broadcast(self, tensor: Tensor, src: int, name: str) -> NoReturn:
        raise AssertionError(f"{name} communicates")


class _Alike(Communicator):
    """A communicator that assumes that the other ranks have the same objects, as in the handshake.

    Attributes:
        model: the prepared model, which lives as long as a loader that has this communicator.
    """

    model: nn.Module

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor] * self.world_size)


class PretendedRank:
    """A rank without the other ranks, and the loaders that its strategy would make."""

    def __init__(self, rank: int, world_size: int, config: StrategyConfig) -> None:
        launch = Launch("spawn", rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
        backend = _Mute(config, launch, CPU)
        self.config, self.rank, self.world_size, self.device = config, rank, world_size, CPU
        self.communicator = _Alike(backend)
        stopping = Stopping(Boundaries(backend.pulse), backend.pulse, None, is_main=rank == 0)
        shares = reduced(config.shares or (1,) * world_size)
        prepared = PreparedModules(shares)
        self.communicator.model = model = nn.Identity()  # in training mode: ranks without samples get stand-ins
        prepared.add(model, model)
        self.sockets = Sockets(self.communicator, backend, prepared, config, stopping)
        self.step = TrainingStep(self.sockets, None)
        self.loop = TrainingLoop(self.step, self.sockets)

    def dataloader(self, dataset: Any, **settings: Any) -> Loader:
        return Loader(self.communicator, self.loop, self.config, self.world_size, dataset, **settings)


def pretended_rank(rank: int = 0, world_size: int = 1, **settings: Any) -> PretendedRank:
    """Return one rank of many, all on this host."""
    return PretendedRank(rank, world_size, StrategyConfig(device="cpu", **settings))


def in_training(loader: Loader) -> MicroBatch:
    """Return the micro-batch that a loader has yielded last, as the training step sees it."""
    micro_batch = _step_of(loader).batches.micro_batch
    assert micro_batch is not None
    return micro_batch


def _step_of(loader: Loader) -> TrainingStep:
    loop = loader._loop
    assert isinstance(loop, TrainingLoop)
    return loop._step


def trained(loader: Loader, count: int | None = None) -> Iterator[Any]:
    """Yield at most ``count`` of a loader's batches, as in a loop with a backward for each."""
    for batch in islice(loader, count):
        _step_of(loader).batches.of_backward(Losses(torch.zeros((), requires_grad=True)))
        yield batch
