"""The handshake: if ranks are about to run different things, all raise an error that names the difference."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import TensorDataset

import unitrain
from unitrain.errors import ConfigError, DataError, by_rank


def begin(settings: list[dict[str, Any]], script: str | None = None) -> None:
    rank = int(os.environ["RANK"])
    if script is not None:
        path = Path(script, f"train{rank}", "train.py")
        path.parent.mkdir()
        path.write_text(f"print({rank})")
        sys.argv[0] = str(path)
    unitrain.init(**settings[rank], timeout_s=60).close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([{"seed": 1}, {"seed": 2}, {"seed": 1}], "seed is 1 on rank 0, 2; 2 on rank 1."),
        ([{}, {"memory_copies": {"every": 2}}, {}], "memory_copies.every is auto on rank 0, 2; 2 on rank 1."),
        ([{"shares": (2, 1, 1)}, {}, {}], r"shares is \[2, 1, 1\] on rank 0; None on rank 1, 2."),
        ([{}, {}, {"ddp": {"bucket_cap_mb": 1}}], r"ddp.bucket_cap_mb is 25.0 on rank 0, 1; 1.0 on rank 2."),
    ],
)
def test_other_settings(settings: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError, match=f"the ranks do not run the same: {said} Give all ranks the same"):
        run_ranks(begin, settings, nprocs=3)


def test_what_may_differ() -> None:
    run_ranks(begin, [{"pin_memory": True}, {"pin_memory": False, "device": "cpu"}])
    run_ranks(begin, [{}, {"horovod": {"controller": "gloo"}}])  # another backend's, which may be missing on a host


def test_another_script(tmp_path: Path) -> None:
    said = r"the script train.py is \w{12} on rank 0; \w{12} on rank 1. Install and start"
    with pytest.raises(ConfigError, match=said):
        run_ranks(begin, [{}, {}], str(tmp_path))


def begin_with_other_code(folder: str) -> None:
    rank = int(os.environ["RANK"])
    changed = Path(folder, f"unitrain{rank}", "training", "loop", "step.py")
    changed.parent.mkdir(parents=True)
    changed.write_text(f"LOSS_SCALE = {rank}")
    unitrain.__file__ = str(changed.parents[2] / "__init__.py")
    unitrain.init(timeout_s=60).close()


def test_other_code_of_any_folder(tmp_path: Path) -> None:
    said = r"the code of UniTrain is \w{12} on rank 0; \w{12} on rank 1. Install and start"
    with pytest.raises(ConfigError, match=said):
        run_ranks(begin_with_other_code, str(tmp_path))


def share_out(lengths: list[int], shift: int) -> list[int]:
    with unitrain.init(timeout_s=60) as strategy:
        data = TensorDataset(torch.arange(lengths[strategy.rank]) + shift * strategy.rank)
        return [int(i) for (batch,) in strategy.dataloader(data, batch_size=2) for i in batch]


@pytest.mark.parametrize(
    ("lengths", "shift", "said"),
    [([9, 8], 0, "the length is 9 on rank 0; 8 on rank 1"), ([9, 9], 5, "the fingerprint is ")],
)
def test_other_data(lengths: list[int], shift: int, said: str) -> None:
    with pytest.raises(DataError, match=f"different data to a loader: {said}.*Pass the whole dataset on every rank"):
        run_ranks(share_out, lengths, shift)


def test_the_ranks_of_each_value_are_named() -> None:
    """As many as fit into a line: ten thousand ranks may differ, each from all others."""
    every = by_rank((rank, rank) for rank in range(10_000))
    assert every == "0 on rank 0; 1 on rank 1; 2 on rank 2; 3 on rank 3; 9996 other values on the others"
    assert by_rank((rank, rank % 2) for rank in range(20)) == (
        "0 on rank 0, 2, 4, 6, 8, 10, 12, 14 ...; 1 on rank 1, 3, 5, 7, 9, 11, 13, 15 ..."
    )
