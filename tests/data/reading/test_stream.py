"""Reading a stream: each rank and worker has its part, in the same order and with the same random numbers."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from streams import Numbers, Shuffling, of_workers
from torch.utils.data import default_collate

import unitrain
from unitrain.data.order.sharding import EpochPlan
from unitrain.data.order.shares import part_of, reduced
from unitrain.data.reading.stream import Piece, WholeStream


@given(
    st.integers(0, 60),
    st.integers(1, 17).map(lambda ranks: (1,) * ranks)
    | st.lists(st.integers(1, 9), min_size=1, max_size=7).map(reduced),
    st.integers(1, 3),
    st.integers(1, 30),
    st.integers(1, 4),
    st.integers(0, 60),
    st.booleans(),
)
def test_a_whole_stream_is_dealt_out_like_map_style_data(
    length: int, shares: tuple[int, ...], workers: int, batch: int, accumulate: int, start: int, drop_last: bool
) -> None:
    batch, start, world_size = max(batch, accumulate), min(start, length), len(shares)
    whole = EpochPlan(
        samples=length,
        global_batch=batch,
        accumulate=accumulate,
        rank=0,
        world_size=1,
        drop_last=drop_last,
        start=start,
    )
    expected = list(whole)
    seen = []
    for rank in range(world_size):
        plan = replace(whole, rank=rank, world_size=world_size, shares=shares)
        stream = WholeStream(Numbers(length), replace(plan, samples=0, start=0), default_collate, ())
        read = [list(stream._pieces(0, start, worker, workers)) for worker in range(workers)]
        # A DataLoader asks its workers in turn.
        pieces = [piece for turn in itertools.zip_longest(*read) for piece in turn if piece is not None]
        mine = list(plan)
        assert [piece.micro_batch for piece in pieces] == mine
        for micro_batch, piece in zip(mine, pieces, strict=True):
            samples = part_of(rank, shares).positions(micro_batch.start, micro_batch.stop).tolist()
            assert piece.samples == len(samples)
            assert piece.batch.tolist() == (samples or [micro_batch.start]), "a rank without samples has a stand-in"
            seen += samples
    assert sorted(seen) == list(range(start, expected[-1].stop if expected else start))


def read_shuffling(workers: int) -> list[list[float]]:
    strategy = unitrain.init()
    torch.rand(strategy.rank)  # ranks may be apart when they begin
    mine = random.getstate()
    loader = strategy.dataloader(Shuffling(), global_batch_size=6, **of_workers(workers))
    rows = []
    for batch in loader:
        rows += batch.tolist()
        torch.rand(3)  # what a model does in between is no business of the stream's
    assert random.getstate() == mine
    again = [row for batch in loader for row in batch.tolist()]
    assert again != rows
    return rows


@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_and_workers_draw_alike(workers: int) -> None:
    (alone,) = run_ranks(read_shuffling, 0, nprocs=1)
    ranks = run_ranks(read_shuffling, workers, nprocs=3)
    assert sorted(row for rows in ranks for row in rows) == sorted(alone)


def test_a_piece_survives_pinning() -> None:
    """Pinning rebuilds what a worker yields; here without a GPU to pin for."""
    from torch.utils.data._utils.pin_memory import pin_memory

    piece = Piece(None, 1, {"x": "text"}, 5)
    assert pin_memory(piece) == piece  # type: ignore[no-untyped-call]
