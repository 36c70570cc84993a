"""Marks for what tests require, with a skip message that says how to install it."""

from importlib.util import find_spec

import pytest
import torch

HOROVOD = pytest.mark.skipif(
    find_spec("horovod") is None, reason="Horovod is not installed: unitrain install-horovod adds it"
)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and pytest -m gpu to see it")
FSDP_IN_16_BITS = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15), reason="torch before 2.15 gathers in fp32"
)
