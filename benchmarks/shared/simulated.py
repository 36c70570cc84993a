"""Rank 0 of a job whose other ranks are simulated: in every collective, they give what rank 0 gives.

The code of rank 0 is real, down to the collectives. These take no time here, and are counted.
"""

from __future__ import annotations

import hmac
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shared.members import Members
from unitrain.checkpoint import Checkpoint
from unitrain.checkpoint.run_state import RunState
from unitrain.checkpoint.sharded.shards import file_name
from unitrain.checkpoint.sharded.together import write_own
from unitrain.checkpoint.store.disk import Disk
from unitrain.checkpoint.store.folder import Draft
from unitrain.communication.backend import Backend, Wait
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.data.order.shares import Shares
from unitrain.job.watch.stopping import Boundaries, Stopping
from unitrain.launch.detect import Launch
from unitrain.pulse import Pulse
from unitrain.training.hooks import Hooks
from unitrain.training.loop.step import TrainingStep
from unitrain.training.models.precision import Precision
from unitrain.training.models.preparation import Preparation
from unitrain.training.models.prepared import PreparedModules

_CPU = torch.device("cpu")
_ELEMENTS = 5


class SimulatedBackend(Backend):
    """Returns what all ranks would have given, and counts.

    Attributes:
        seconds: CPU time of the simulation itself.
        calls: number of collectives, by kind.
        received: bytes that the other ranks have given in them.
        sent: bytes that rank 0 has broadcast.
        secret: that of the job, with which the ranks sign what they prove; None after they have.
    """

    name = "simulated"

    def __init__(self, config: StrategyConfig, launch: Launch) -> None:
        super().__init__(config, launch, _CPU)
        self.seconds = 0.0
        self.calls = Counter[str]()
        self.received = self.sent = 0
        self.secret: bytes | None = None
        self._nonces = b""

    def start(self) -> tuple[int, int]:
        """Return rank and world size."""
        return self.rank, self.world_size

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Wait:
        """Reduce what all ranks give."""
        return self._counted("all_reduce", tensor.nbytes, lambda: self._reduce(tensor, op, name))

    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Return what all ranks give."""
        bytes_of_others = tensor.nbytes * (self.world_size - 1)
        return self._counted("all_gather", bytes_of_others, lambda: self._rows(tensor, name))

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Wait:
        """Leave rank 0's tensor unchanged."""
        self.sent += 0 if src else tensor.nbytes
        return self._counted("broadcast", tensor.nbytes if src else 0, lambda: self._send(tensor, src, name))

    def _counted(self, kind: str, received: int, action: Callable[[], Any]) -> Callable[[], Any]:
        self.calls[kind] += 1
        self.received += received

        def wait() -> Any:
            began = time.thread_time()
            result = action()
            self.seconds += time.thread_time() - began
            return result

        return wait

    # What verb_check and authentication of unitrain.job.joining expect of ranks; others give what rank 0 does.

    def _reduce(self, tensor: Tensor, op: str, name: str) -> None:
        if name.startswith(f"self_test.{op}."):
            everyone = torch.arange(_ELEMENTS) + (torch.arange(self.world_size) % 3).unsqueeze(1)
            tensor.copy_({"sum": everyone.sum(0), "max": everyone.amax(0), "min": everyone.amin(0)}[op])
        elif op == "sum":
            tensor.mul_(self.world_size)

    def _rows(self, tensor: Tensor, name: str) -> Tensor:
        if name.startswith("self_test.gather."):
            rows = torch.arange(self.world_size * _ELEMENTS).view(self.world_size, _ELEMENTS) % 251
            return rows.to(tensor.dtype)
        if self.secret is not None and tensor.numel() == 33:
            self._nonces = tensor[1:].numpy().tobytes() * self.world_size
        elif self.secret is not None and tensor.numel() == 32:
            key, self.secret = hmac.digest(self.secret, self._nonces, "sha256"), None
            signed = b"".join(hmac.digest(key, f"rank {rank}".encode(), "sha256") for rank in range(self.world_size))
            return torch.frombuffer(bytearray(signed), dtype=torch.uint8).view(self.world_size, 32)
        return tensor.unsqueeze(0).repeat(self.world_size, *[1] * tensor.dim())

    def _send(self, tensor: Tensor, src: int, name: str) -> None:
        if name.startswith("self_test."):
            tensor.copy_((torch.arange(_ELEMENTS) * 7 + src) % 251)


class SimulatedRank0:
    """The parts of rank 0's strategy that prepare and save, in a job of simulated ranks.

    Args:
        launch: its place.
        **settings: settings of the strategy.
    """

    def __init__(self, launch: Launch, **settings: Any) -> None:
        self.config = StrategyConfig(backend="simulated", device="cpu", **settings)
        self.launch = launch
        self.backend = SimulatedBackend(self.config, launch)
        pulse = Pulse()
        self.communicator = Communicator(self.backend, pulse, key=b"k" * 32)
        self._prepared = PreparedModules(distributed=True, shares=Shares(None, launch.world_size))
        self.step = TrainingStep(
            self.communicator, self.backend, self._prepared, Hooks(), None, None, lambda: None, self.config
        )
        precision = Precision(self.config.precision, _CPU)
        self._preparation = Preparation(
            self.communicator, self.backend, precision, self._prepared, self.step.register, self.step.batches.in_use,
            self.config,
        )  # fmt: skip

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        """See ``Strategy.prepare``."""
        return self._preparation.prepare(objects)

    def train(self, loss: Tensor, optimizer: Optimizer) -> None:
        """See ``Strategy.step``."""
        self.step.backward(loss, (optimizer,))
        self.step.update(optimizer)

    def checkpoint(self, folder: Path, **objects: Any) -> Checkpoint:
        """See ``Strategy.checkpoint``."""
        pulse = self.communicator.pulse
        return Checkpoint(
            self.communicator,
            RunState(objects, self._prepared, None, self.communicator, self.config, {}),
            self.step,
            Stopping(Boundaries(pulse), pulse, None, is_main=True),
            None,
            folder,
            keep=1,
            background=False,
            restored=lambda: None,
        )


def written_by_others(rank_0: SimulatedRank0, checkpoint: Checkpoint, others: Members, folder: Path) -> None:
    """Have the other ranks write their files of a checkpoint, which are in its folder as soon as that has begun."""
    folder.mkdir()
    others.do("call", _write, folder, list(vars(checkpoint)["_state"].objects))
    checkpoints = vars(checkpoint)["_folder"]
    begin = checkpoints.begin

    def begin_with_files(step: int) -> Draft | None:
        began = time.thread_time()
        draft: Draft | None = begin(step)
        assert draft is not None
        for path in folder.iterdir():
            path.rename(Path(draft.store.location, draft.name, path.name))
        rank_0.backend.seconds += time.thread_time() - began
        return draft

    checkpoints.begin = begin_with_files


def _write(rank: int, folder: Path, objects: Sequence[str]) -> None:
    """Write what a rank has that owns no parameter: there are more ranks than parameters."""
    write_own(Draft(Disk(folder.parent), folder.name, ""), rank, file_name(rank), {name: [] for name in objects})
