"""Counts the bytes of all tensors that are made while it watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that counts the bytes of the tensors that torch makes in it, and subtracts those it frees.

    Attributes:
        peak: the most bytes that have been in use at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._sizes: Any = WeakIdKeyDictionary()  # of storages

    @property
    def bytes(self) -> int:
        """The bytes in use now."""
        return sum(self._sizes.values())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call an operator, and count its outputs."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu" and self._sizes.get(storage) != storage.nbytes():
            self._sizes[storage] = storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def __enter__(self) -> LiveTensors:
        """Start to count."""
        resize, sizes = torch.UntypedStorage.resize_, self._sizes

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            sizes[storage] = size
            self.peak = max(self.peak, self.bytes)
            return storage

        self._patch = patch.object(torch.UntypedStorage, "resize_", resized)  # FSDP frees and allocates with it
        self._patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        """Count no more."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._patch.stop()
