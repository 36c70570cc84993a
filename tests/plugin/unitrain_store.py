"""A backend on a key-value store: every rank leaves its tensors there, and reads the others'. Slow, and exact."""

import zlib
from collections import Counter
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed import DistError

from unitrain import Backend, Section
from unitrain.launch.rendezvous import rendezvous


class StoreSettings(Section):
    """Settings of the backend store."""

    level: Annotated[int, Field(ge=0, le=9)] = 0
    """How hard zlib compresses what is left in the store, from 0 (not at all) to 9."""


class StoreBackend(Backend):
    """Communicates through the store in which the ranks of a job meet."""

    name = "store"
    Settings = StoreSettings
    served_by = "any launcher"
    matches_by_name = True

    @classmethod
    def is_engine_error(cls, error: BaseException) -> bool:
        """Whether the store says that a rank does not come in time, or that rank 0, which keeps it, has gone."""
        return isinstance(error, DistError)

    def start(self) -> tuple[int, int]:
        """Meet the other ranks."""
        self._store = rendezvous(self.launch, self.config.timeout_s)
        self._calls = Counter[str]()
        return self.launch.rank, self.launch.world_size

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Callable[[], None]:
        """Gather all tensors, and reduce them in the order of the ranks: to the same bits on each."""
        gather = self.all_gather(tensor, name)

        def finish() -> None:
            everyone = gather()
            reduced = everyone.sum(0) if op == "sum" else everyone.amax(0) if op == "max" else everyone.amin(0)
            tensor.copy_(reduced)

        return finish

    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Leave the tensor under its name, the number of the call and the rank."""
        self._calls[name] += 1
        call, ranks = self._calls[name], range(self.world_size)
        data = zlib.compress(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes(), self.settings.level)
        self._store.set(f"{name}/{call}/{self.rank}", data)  # type: ignore[arg-type]  # torch takes bytes, too

        def finish() -> Tensor:
            found = [zlib.decompress(self._store.get(f"{name}/{call}/{rank}")) for rank in ranks]
            self._store.delete_key(f"{name}/{call - 1}/{self.rank}")  # all ranks are here, so all have read it
            parts = [torch.frombuffer(bytearray(part), dtype=tensor.dtype).view(tensor.shape) for part in found]
            return torch.stack(parts).to(tensor.device)

        return finish

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Callable[[], None]:
        """Gather all tensors, and keep one."""
        gather = self.all_gather(tensor, name)

        def finish() -> None:
            tensor.copy_(gather()[src])

        return finish
