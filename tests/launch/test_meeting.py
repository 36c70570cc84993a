"""How the ranks meet in a store that their launcher keeps open, where earlier ranks have been."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

from unitrain.errors import CommunicationError, LaunchError
from unitrain.launch.detect import Launch
from unitrain.launch.meeting import meet_in_new_store, meet_in_served_store

LONG_S = 20.0


@pytest.fixture
def served() -> TCPStore:
    """The store of a launcher."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Ranks:
    """The ranks of one start of a job, each with a connection of its own."""

    def __init__(self, served: TCPStore, world_size: int) -> None:
        self._port = served.port
        self._world_size = world_size
        self._threads = ThreadPoolExecutor(world_size)
        self._coming: dict[int, Future[Store]] = {}

    def come(self, *ranks: int, timeout_s: float = LONG_S) -> None:
        for rank in ranks:
            self._coming[rank] = self._threads.submit(self._come, rank, timeout_s)

    def _come(self, rank: int, timeout_s: float) -> Store:
        address = f"127.0.0.1:{self._port}"
        launch = Launch("torchrun", rank=rank, world_size=self._world_size, rendezvous="served", address=address)
        store = TCPStore("127.0.0.1", self._port, is_master=False)
        return meet_in_served_store(store, launch, timedelta(seconds=timeout_s))

    def met(self) -> list[Store]:
        return [self._coming[rank].result(LONG_S) for rank in sorted(self._coming)]

    def error(self, rank: int) -> str:
        with pytest.raises(CommunicationError) as raised:
            self._coming[rank].result(LONG_S)
        return str(raised.value)


def assert_share_an_empty_part(stores: Sequence[Store]) -> None:
    first = stores[0]
    assert not first.check(["key"])
    first.set("key", "value")
    assert all(store.get("key") == b"value" for store in stores)


@pytest.mark.parametrize("first_to_come", [0, 2])
def test_the_next_ranks_share_nothing_with_those_before(served: TCPStore, first_to_come: int) -> None:
    for world_size in (3, 2, 3, 3):  # without a count of restarts, as after a host has left and come back
        ranks = Ranks(served, world_size)
        first = min(first_to_come, world_size - 1)
        ranks.come(first)
        time.sleep(0.1)
        ranks.come(*(set(range(world_size)) - {first}))
        assert_share_an_empty_part(ranks.met())


def test_ranks_that_had_not_all_come_are_not_joined_by_the_next(served: TCPStore) -> None:
    before = Ranks(served, 3)
    before.come(0, 1, timeout_s=0.5)
    assert "rank 0 of 3 waited 0.5 s at 127.0.0.1" in before.error(0)
    assert "but rank 2 did not connect." in before.error(0)
    assert "but rank 2 did not connect." in before.error(1)
    ranks = Ranks(served, 3)
    ranks.come(2)  # for which only the others' earlier processes have waited
    time.sleep(0.1)
    ranks.come(0, 1)
    assert_share_an_empty_part(ranks.met())


def test_rank_0_that_does_not_come_is_named(served: TCPStore) -> None:
    complete = Ranks(served, 2)
    complete.come(0, 1)
    complete.met()
    ranks = Ranks(served, 2)
    ranks.come(1, timeout_s=0.5)
    assert "rank 1 of 2 waited 0.5 s" in ranks.error(1)
    assert "but rank 0 did not connect." in ranks.error(1)


def test_a_rank_of_another_step_of_slurm_is_refused_and_not_counted(served: TCPStore) -> None:
    launch = Launch("srun", world_size=2, rendezvous="tcp", address="node1:20000", step="7.0")
    with ThreadPoolExecutor(1) as pool:
        rank_0 = pool.submit(meet_in_new_store, served, launch, timedelta(seconds=LONG_S))
        store = TCPStore("127.0.0.1", served.port, is_master=False)
        other = replace(launch, rank=1, step="7.1")
        with pytest.raises(
            LaunchError, match=r"rank 1 of srun.s job 7\.1 .* node1:20000, where the ranks of job 7\.0 meet"
        ):
            meet_in_new_store(store, other, timedelta(seconds=LONG_S))
        meet_in_new_store(store, replace(launch, rank=1), timedelta(seconds=LONG_S))
        rank_0.result()
