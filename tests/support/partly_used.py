"""A model of which a forward uses a part, for tests of unused parameters."""

from __future__ import annotations

from torch import Tensor, nn


class PartlyUsed(nn.Module):
    """Two layers, of which the forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out
