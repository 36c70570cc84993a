"""Batches of any structure: rebuilding them, and making empty ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from unitrain import DataError
from unitrain.data.structure import rebuilt, without_rows


def test_without_rows() -> None:
    assert without_rows({"n": 3, "x": [1]}, {"n": 3, "x": [1, 1]}) == {"n": 3, "x": []}
    assert without_rows(np.ones((1, 2)), np.ones((2, 2))).shape == (0, 2)
    assert without_rows(torch.ones(2), torch.ones(2)).tolist() == [1, 1]
    for one, two in ((1, 2), (object(), object()), ({"a": 1}, {"b": 1}), (torch.ones(1, 1), torch.ones(2, 2))):
        with pytest.raises(DataError, match="drop_last=True"):
            without_rows(one, two)


def test_rebuilt_leaves_what_moves_itself() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    seen: list[Any] = []

    def note(value: Any) -> Any:
        seen.append(value)
        return value

    result = rebuilt([packed, (torch.ones(1), "text")], note)
    assert [type(value).__name__ for value in seen] == ["PackedSequence", "Tensor", "str"]
    assert result[0] is packed
