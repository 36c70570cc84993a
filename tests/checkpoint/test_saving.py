"""``strategy.save`` and ``load``: a complete file or the old one, plain data only, and errors with a reason."""

from __future__ import annotations

import os
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needs import GPU
from torch import nn

import unitrain
from unitrain import CheckpointError, Strategy

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(value=PLAIN)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_plain_values_come_back(strategy: Strategy, tmp_path: Path, value: Any) -> None:
    strategy.save(value, tmp_path / "value.pt")
    assert strategy.load(tmp_path / "value.pt") == value


def test_states_at_any_depth(strategy: Strategy, tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    prepared, *_ = strategy.prepare(model, optimizer, scheduler)
    strategy.save(OrderedDict(a=[prepared, (optimizer,)], b={"c": scheduler, 7: torch.ones(2)}), str(tmp_path / "s.pt"))
    loaded = strategy.load(str(tmp_path / "s.pt"))
    assert torch.equal(loaded["a"][0]["weight"], model.weight)
    assert loaded["a"][1][0]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert loaded["b"]["c"]["step_size"] == 3
    assert loaded["b"][7].tolist() == [1, 1]


class Mine:
    pass


class Explodes:
    """Fails in the midst of being written."""

    def __reduce__(self) -> Any:
        raise ZeroDivisionError("in the midst")


def test_a_device_is_not_replaced(strategy: Strategy, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe is a device or a pipe: give the path of a file"):
        strategy.save(1, tmp_path / "pipe")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda: None, "Can't pickle|Can't get local"),
        (Explodes(), "ZeroDivisionError: in the midst"),
        (Mine(), "test_saving.Mine is neither a tensor nor plain data"),
        (np.ones(1), r"value\['new'\]\[1\] is a ndarray: numpy.* is neither a tensor nor plain data"),
        (random.Random, "random.Random is neither"),
    ],
    ids=["function", "error", "object", "numpy", "class"],
)
def test_what_could_not_be_read_is_not_written_and_the_old_file_stays(
    strategy: Strategy, tmp_path: Path, value: Any, why: str
) -> None:
    strategy.save("old", tmp_path / "value.pt")
    with pytest.raises(CheckpointError, match=rf"value\.pt could not be written: .*{why}"):
        strategy.save({"new": [torch.ones(1000), value]}, tmp_path / "value.pt")
    assert strategy.load(tmp_path / "value.pt") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["value.pt"]


class Runs:
    """Would leave a folder behind, were it unpickled as pickle does."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_files_have_the_usual_permissions(strategy: Strategy, tmp_path: Path) -> None:
    """Those that umask gives: a colleague can read a checkpoint as any other file."""
    before = os.umask(0o027)
    try:
        strategy.save(1, tmp_path / "value.pt")
    finally:
        os.umask(before)
    assert (tmp_path / "value.pt").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: os.truncate(path, path.stat().st_size // 2), "could not be read: "),
        (lambda path: path.write_bytes(b""), "could not be read: "),
        (lambda path: path.write_text("hello world\n"), "could not be read: "),
        (lambda path: torch.save({"model": Runs()}, path), "mkdir is neither .* pickled code is never run"),
    ],
    ids=["missing", "truncated", "empty", "text", "object"],
)
def test_a_file_that_is_none_of_ours(
    strategy: Strategy, tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    path = tmp_path / "value.pt"
    strategy.save({"a": torch.ones(100)}, path)
    spoil(path)
    with pytest.raises(CheckpointError, match=why) as raised:
        strategy.load(path)
    assert "value.pt" in str(raised.value)
    assert "weights_only" not in str(raised.value)
    assert not Path("ran").exists()


def test_parameters_and_views_are_loaded(strategy: Strategy, tmp_path: Path) -> None:
    strategy.save({"weight": nn.Parameter(torch.ones(2)), "rows": torch.arange(4)[::2]}, tmp_path / "value.pt")
    loaded = strategy.load(tmp_path / "value.pt")
    assert isinstance(loaded["weight"], nn.Parameter)
    assert loaded["rows"].tolist() == [0, 2]


def test_a_script_s_own_mapping_of_a_file_is_left_alone(strategy: Strategy, tmp_path: Path) -> None:
    path = tmp_path / "value.pt"
    strategy.save(torch.ones(10_000), path)
    own = torch.load(path, mmap=True)
    own += 1  # in its private copy of the pages
    assert torch.equal(strategy.load(path), torch.ones(10_000))
    assert torch.equal(own, torch.full((10_000,), 2.0))


@pytest.mark.gpu
@GPU
def test_files_of_a_gpu_can_be_loaded_anywhere(tmp_path: Path) -> None:
    with unitrain.init(backend="single", device="cuda") as strategy:
        model = strategy.prepare(nn.Linear(2, 2))
        strategy.save(model, tmp_path / "model.pt")
        strategy.checkpoint(tmp_path / "run", background=False, model=model).save()
    for file in (tmp_path / "model.pt", tmp_path / "run" / "step-0000000000" / "model.pt"):
        assert {tensor.device.type for tensor in torch.load(file, weights_only=True).values()} == {"cpu"}
