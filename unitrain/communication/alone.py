"""``Alone``: collectives without the other ranks, for code that must not wait for them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from unitrain.communication.backend import Backend, LocalBackend, Wait


class Alone(LocalBackend):
    """A backend whose results are those that its world would have if every rank gave what this one does.

    They have the usual shapes, and take the usual memory.

    Args:
        backend: the backend of the world.
    """

    name = "alone"

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend.config, backend.launch, backend.device)
        self.world_size: int = backend.world_size

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Wait:
        """Multiply a sum by the world size. Maximum and minimum are the tensor itself."""
        if op == "sum":
            tensor.mul_(self.world_size)
        return lambda: None

    def all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """Return the tensor once for each rank."""
        return lambda: tensor.unsqueeze(0).repeat(self.world_size, *[1] * tensor.dim())
