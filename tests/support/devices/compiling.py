"""Compiles with a backend of torch.compile that needs no C++ compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn


@contextmanager
def compiled_by(backend: str) -> Iterator[None]:
    """Have ``nn.Module.compile`` use another backend by default than inductor, which takes half a minute."""
    compile_module = nn.Module.compile

    def compile_with_backend(module: nn.Module, **options: Any) -> None:
        compile_module(module, **{"backend": backend, **options})

    with mock.patch.object(nn.Module, "compile", compile_with_backend):
        yield
