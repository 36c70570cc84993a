"""The windows of all optimizers: their parameters follow what the script does to an optimizer."""

from __future__ import annotations

from unittest.mock import Mock
from weakref import ref

import pytest
from plain_loop import model_of, sgd
from pretended import pretended_rank

from unitrain.training.loop.averaging import GradientAveraging


def test_buckets_are_made_later_if_there_was_no_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, model = pretended_rank(0, 2), model_of()
    rank.sockets.prepared.add(model, model)
    optimizer = sgd(model)
    with monkeypatch.context() as patch:
        patch.setattr(rank.step.averaging, "_bucketed", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            rank.step.windows.of([optimizer])
    [window] = rank.step.windows.of([optimizer])
    assert isinstance(rank.step.averaging, GradientAveraging)
    assert len(rank.step.averaging._progress[ref(optimizer)].finishers) == 1
    assert window.trained == list(model.parameters())
