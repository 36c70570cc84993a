"""Communicators of a part of the ranks: ``Communicator.part``."""

from __future__ import annotations

import pytest
import torch
from needs import HOROVOD
from ranks import on_ranks

from unitrain import init
from unitrain.communication.backend import load_backend
from unitrain.errors import ConfigError, UsageError

GROUPS = [[0, 2], [1]]


@pytest.mark.parametrize(
    "backend",
    ["ddp", pytest.param("fsdp", marks=pytest.mark.all("the same groups")), pytest.param("horovod", marks=HOROVOD)],
)
@on_ranks(nprocs=3)
def test_a_group_communicates_alone(backend: str) -> None:
    load_backend(backend).allow_parts()
    with init(backend=backend, device="cpu") as strategy:
        whole = strategy.communicator
        assert whole.part([[0, 1, 2]]) is whole
        for _ in range(2):  # Horovod refuses a process set that it has
            part = whole.part(GROUPS)
        ranks = next(ranks for ranks in GROUPS if strategy.rank in ranks)
        assert (part.rank, part.world_size, part.is_main) == (
            ranks.index(strategy.rank), len(ranks), strategy.rank < 2
        )  # fmt: skip
        here = torch.tensor([strategy.rank, 1], dtype=torch.int16)
        if strategy.rank != 1:  # a group makes calls that another does not
            part.barrier()
            with (
                whole.collectives.refused("by a test"),
                pytest.raises(UsageError, match="barrier was called by a test"),
            ):
                part.barrier()
        assert part.all_reduce(here).tolist() == [sum(ranks), len(ranks)]
        assert part.all_gather(here)[:, 0].tolist() == ranks
        assert int(part.broadcast(here, len(ranks) - 1)[0]) == ranks[-1]
        assert part.all_gather_object({"rank": strategy.rank}) == [{"rank": rank} for rank in ranks]
        assert int(whole.all_reduce(here)[0]) == 3


def test_a_backend_without_groups_says_so() -> None:
    with (
        init(backend="single", device="cpu") as strategy,
        pytest.raises(ConfigError, match="backend 'single' communicates among all ranks only"),
    ):
        strategy.communicator.part([[0], [1]])
