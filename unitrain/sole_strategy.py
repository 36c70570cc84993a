"""The base of the strategies of one process, which has nobody to communicate with."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from unitrain.communicator import Wait
from unitrain.launch.detect import Launch
from unitrain.strategy import Strategy


class SoleStrategy(Strategy):
    """Base of the strategies of one process, which has nobody to communicate with."""

    served_by = "plain python"
    compressions: ClassVar[tuple[str, ...]] = ("none",)

    @classmethod
    def expected_world(cls, launch: Launch) -> int:
        """Always one process, whoever launched it."""
        return 1

    def _start(self) -> tuple[int, int]:
        return 0, 1

    def _all_reduce(self, tensor: Tensor, op: str, name: str) -> Wait:
        return lambda: None

    def _all_gather(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        return lambda: tensor.unsqueeze(0)

    def _broadcast(self, tensor: Tensor, src: int, name: str) -> Wait:
        return lambda: None
