"""Batches of any structure: what is rebuilt."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
import torch

from unitrain.communication.structure import rebuilt, tensors

ROWS = torch.ones(2)
COUNTED: Any = Counter(rows=3)
COUNTED["batch"] = ROWS


def test_rebuilt_leaves_what_moves_itself() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    seen: list[Any] = []

    def note(value: Any) -> Any:
        seen.append(value)
        return value

    result = rebuilt([packed, (torch.ones(1), "text")], note)
    assert [type(value).__name__ for value in seen] == ["PackedSequence", "Tensor", "str"]
    assert result[0] is packed


class Boxes(list[Any]):
    def __init__(self, boxes: Any, size: tuple[int, int]) -> None:
        super().__init__(boxes)
        self.size = size


class Sample(tuple[Any, ...]):
    label: str

    def __new__(cls, inputs: Any, targets: Any, *, label: str) -> Sample:
        made = super().__new__(cls, (inputs, targets))
        made.label = label
        return made


class Named(namedtuple("Fields", "inputs targets")):
    def __new__(cls, inputs: Any) -> Named:
        return super().__new__(cls, inputs, None)


@dataclass
class Output(OrderedDict[str, Any]):
    """Refuses ``update``, and has its items as attributes, too, as transformers' ModelOutput does."""

    logits: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("an Output can't be updated")


@pytest.mark.parametrize(
    ("batch", "same"),
    [
        (Boxes([ROWS], (2, 3)), lambda new: new.size == (2, 3) and new[0].is_meta),
        (Sample(ROWS, 1, label="cat"), lambda new: new.label == "cat" and new[0].is_meta and new[1] == 1),
        (Named(ROWS), lambda new: new.inputs.is_meta and new.targets is None),
        (Output(ROWS), lambda new: new.logits.is_meta and new["logits"] is new.logits),
        (UserDict(rows=ROWS), lambda new: new["rows"].is_meta),
        (COUNTED, lambda new: new["rows"] == 3 and new["batch"].is_meta),  # its update() adds
        (torch.max(ROWS, 0), lambda new: new.values.is_meta and new.indices.is_meta),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_of_any_class_is_kept_and_is_the_same_object_if_nothing_changes(batch: Any, same: Any) -> None:
    assert rebuilt(batch, lambda leaf: leaf) is batch
    assert rebuilt([batch], lambda leaf: leaf)[0] is batch
    new = rebuilt(batch, lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf)
    assert type(new) is type(batch)
    assert same(new)
    assert not any(tensor.is_meta for tensor in tensors(batch))
