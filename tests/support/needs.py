"""Marks for what tests require, with a skip message that says how to install it."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

HOROVOD = pytest.mark.skipif(
    find_spec("horovod") is None, reason="Horovod is not installed: unitrain install-horovod adds it"
)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and pytest -m gpu to see it")
FSDP = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="fsdp needs torch 2.13 or newer"
)
FSDP_IN_16_BITS = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15), reason="torch before 2.15 gathers in fp32"
)


@contextmanager
def compiled_by(backend: str) -> Iterator[None]:
    """Have ``nn.Module.compile`` use another backend by default than inductor, which needs a C++ compiler."""
    compile_module = nn.Module.compile

    def compile_with_backend(module: nn.Module, **options: Any) -> None:
        compile_module(module, **{"backend": backend, **options})

    with mock.patch.object(nn.Module, "compile", compile_with_backend):
        yield
