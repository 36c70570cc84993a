"""``torch.sim``: what torch and its users ask of a device's module, by the names that ``torch.cuda`` has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

_native: Any = import_module("simulated_device_module")
Device = torch.device | str | int | None
current_device = _native.current_device
device_count = _native.device_count
host_waits = _native.host_waits
set_memory_limit = _native.set_memory_limit
waiting_operators = _native.waiting_operators
current_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream
synchronize = torch.accelerator.synchronize
empty_cache = torch.accelerator.empty_cache
memory_allocated = torch.accelerator.memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_allocated = torch.accelerator.max_memory_allocated
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
mem_get_info = torch.accelerator.get_memory_info
default_generators = tuple(_native.default_generator(i) for i in range(device_count()))


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return cast(int, current_device() if index is None else index)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return bool(_native.is_forked())


def init() -> None: ...


_lazy_init = init


def set_device(device: Device) -> None:
    _native.set_device(_index(device))


class device:  # noqa: N801  (as torch.cuda's)
    """Makes a device the current one within the block; None and -1 change nothing."""

    def __init__(self, device: Device) -> None:
        self._index = -1 if device is None else _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        if self._index >= 0:
            _native.set_device(self._index)

    def __exit__(self, *error: object) -> None:
        _native.set_device(self._before)


class Stream(torch.Stream):
    """A stream of a device, the current one by default."""

    def __new__(cls, device: Device = None, priority: int = 0, **known: Any) -> Stream:
        if known:
            return super().__new__(cls, priority=priority, **known)
        return super().__new__(cls, torch.device("sim", _index(device)), priority=priority)


def Event(enable_timing: bool = False, **more: Any) -> torch.Event:  # noqa: N802  (torch's own class: it takes no other)
    return torch.Event("sim", enable_timing=enable_timing, **more)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one of its device, and its device the current one, within the block."""
    if stream is None:
        yield
        return
    with device(stream.device):
        before = current_stream(stream.device)
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)


def get_rng_state(device: Device = None) -> Tensor:
    state: Tensor = default_generators[_index(device)].get_state()
    return state


def set_rng_state(new_state: Tensor, device: Device = None) -> None:
    default_generators[_index(device)].set_state(new_state)


def manual_seed(seed: int) -> None:
    default_generators[_index(None)].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


def get_device_name(device: Device = None) -> str:
    return "a simulated accelerator"


class _Properties:
    def __init__(self, index: int) -> None:
        self.name = get_device_name()
        self.uuid = f"simulated-{index}"
        self.total_memory = mem_get_info(index)[1]


def get_device_properties(device: Device = None) -> _Properties:
    return _Properties(_index(device))
