"""A backend that communicates through torch's key-value store alone: slow, and exact."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import DistError

from unitrain.backend import Backend
from unitrain.launch.rendezvous import rendezvous


class StoreBackend(Backend):
    """Every rank leaves its tensor in the store under a name, and reads the others'."""

    name = "store"
    served_by = "anything that starts processes"
    matches_by_name = True

    @classmethod
    def is_engine_error(cls, error: BaseException) -> bool:
        return isinstance(error, DistError)

    def start(self) -> tuple[int, int]:
        self._store = rendezvous(self.launch, self.config.timeout_s)
        self._calls: Counter[str] = Counter()
        return self.launch.rank, self.launch.world_size

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Callable[[], None]:
        gather = self.all_gather(tensor, name)

        def finish() -> None:
            everyone = gather()
            result = everyone.sum(0) if op == "sum" else everyone.amax(0) if op == "max" else everyone.amin(0)
            tensor.copy_(result)

        return finish

    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        key = self._key(name)
        self._leave(f"{key}/{self.rank}", tensor)
        return lambda: torch.stack([self._take(f"{key}/{rank}") for rank in range(self.world_size)])

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Callable[[], None]:
        key = self._key(name)
        if self.rank == src:
            self._leave(key, tensor)

        def finish() -> None:
            if self.rank != src:
                tensor.copy_(self._take(key))

        return finish

    def _key(self, name: str) -> str:
        """Return a key for this call: ranks match calls by name, in whatever order the names come."""
        self._calls[name] += 1
        return f"{name}/{self._calls[name]}"

    def _leave(self, key: str, tensor: Tensor) -> None:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        self._store.set(key, buffer.getvalue())  # type: ignore[arg-type]

    def _take(self, key: str) -> Tensor:
        tensor: Tensor = torch.load(io.BytesIO(self._store.get(key)), weights_only=True)
        return tensor
