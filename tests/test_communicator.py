"""Collectives that would be silently wrong, or fail on one rank only, raise an error on all ranks."""

from __future__ import annotations

import pickle

import pytest
import torch
from ranks import run_ranks

import unitrain
from unitrain import UsageError


def gather(backend: str) -> list[str]:
    """Give tensors of other shapes, then of other dtypes, then such as go together."""
    with unitrain.init(backend=backend, device="cpu", timeout_s=20) as strategy:
        said = []
        for mine in (torch.ones(3 + strategy.rank), torch.ones(2, dtype=[torch.float32, torch.float64][strategy.rank])):
            with pytest.raises(UsageError) as refused:
                strategy.all_gather(mine)
            said.append(str(refused.value))
        assert strategy.all_gather(torch.tensor(strategy.rank)).tolist() == [0, 1]
        return said


@pytest.mark.parametrize("backend", ["ddp"])
def test_tensors_that_can_not_be_stacked_are_refused_on_all_ranks(backend: str) -> None:
    for shapes, dtypes in run_ranks(gather, backend):
        assert "but got float32[3] on rank 0; float32[4] on rank 1: pad them" in shapes
        assert "but got float32[2] on rank 0; float64[2] on rank 1: pad them" in dtypes


def test_what_communicates_can_not_be_pickled() -> None:
    with unitrain.init(backend="single") as strategy:
        with pytest.raises(UsageError, match="can't be pickled"):
            pickle.dumps(strategy.communicator)
        with pytest.raises(UsageError, match="can't be pickled"):
            pickle.dumps(strategy)
