"""Notes where the host would wait for a GPU, without one: fake tensors know on which device they would be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from unitrain.communication.backend import load_backend
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.launch.detect import Launch

GPU_0 = torch.device("cuda", 0)


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations within the block that wait for all that is queued on a GPU.

    Attributes:
        found: their names.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> Waits:
        self._fake.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._fake.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            self.found.append(str(func))
        return func(*args, **kwargs)


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    aten = torch.ops.aten
    if func is aten._local_scalar_dense.default:
        return bool(args[0].is_cuda)
    if func is aten._to_copy.default:
        target = kwargs.get("device") or args[0].device
        return not kwargs.get("non_blocking") and args[0].device.type != target.type
    if func is aten.copy_.default and isinstance(args[1], Tensor):
        return not (len(args) > 2 and args[2]) and args[0].device.type != args[1].device.type
    return False


def communicator_on_gpu() -> Communicator:
    """Return the communicator of a single process whose tensors would be on a GPU."""
    config = StrategyConfig(backend="single")
    return Communicator(load_backend("single")(config, Launch("python"), GPU_0))
