"""Batches of any structure: what is rebuilt."""

from __future__ import annotations

from typing import Any

import torch

from unitrain.data.structure import rebuilt


def test_rebuilt_leaves_what_moves_itself() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    seen: list[Any] = []

    def note(value: Any) -> Any:
        seen.append(value)
        return value

    result = rebuilt([packed, (torch.ones(1), "text")], note)
    assert [type(value).__name__ for value in seen] == ["PackedSequence", "Tensor", "str"]
    assert result[0] is packed
