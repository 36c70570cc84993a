"""torch's lazy device as a second device where there is no GPU: it comes with torch, and computes on the CPU.

Its kernels refuse tensors of the CPU, as a GPU's do. What it lacks is copying into a tensor of the CPU.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def use_lazy_device() -> None:
    """Make the device ``lazy:0`` usable in this process."""
    from torch._lazy import ts_backend

    ts_backend.init()
    copy = Tensor.copy_

    def copied(self: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        leaves = source.device.type == "lazy" and self.device.type == "cpu"
        return copy(self, source.cpu() if leaves else source, *args, **kwargs)

    setattr(Tensor, "copy_", copied)  # noqa: B010  (mypy takes no assignment to a method)
