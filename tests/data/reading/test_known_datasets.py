"""Which datasets are known to draw no random numbers, and the fast path for collating their samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import collate as torch_collate
from torchvision.datasets import FakeData

from unitrain.data.reading.known_datasets import collated_rows, draws_nothing, is_default_collate

ROWS = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
TABLE = datasets.Dataset.from_dict({"x": [1, 2, 3]})


class MyRows(TensorDataset):
    """May do as it likes in __getitem__."""


class MySubset(Subset[Any]):
    """Likewise."""


class MyList(list[int]):
    """Likewise."""


MINE: Any = MyList(range(6))


class Formatted(Dataset[int]):
    """Has an attribute that Hugging Face's have."""

    format = {"type": "torch"}

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(9, ()))


@pytest.mark.parametrize(
    "dataset",
    [
        ROWS, Subset(ROWS, [1, 2]), Subset(Subset(ROWS, range(3)), [0]), ConcatDataset([ROWS, Subset(ROWS, [0])]),
        [1, 2], (1, 2), range(4), np.arange(4), torch.arange(4), TABLE, TABLE.with_format("torch"),
        TABLE.with_format("numpy"), Subset(TABLE, [0]),
    ],
)  # fmt: skip
def test_these_draw_nothing(dataset: Any) -> None:
    assert draws_nothing(dataset)


@pytest.mark.parametrize(
    "dataset",
    [
        MyRows(torch.arange(3)), Subset(MyRows(torch.arange(3)), [0]), MySubset(ROWS, [0]), MINE, Formatted(),
        Subset(ROWS, MINE), ConcatDataset([ROWS, MINE]),
        TensorDataset(nn.Parameter(torch.ones(3))), FakeData(2), TABLE.with_transform(lambda batch: batch),
        Subset(TABLE.with_transform(lambda batch: batch), [0]),
    ],
)  # fmt: skip
def test_any_other_may_draw(dataset: Any) -> None:
    assert not draws_nothing(dataset)


def test_torch_s_collate_function_is_known_as_torch_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_default_collate(default_collate)
    assert not is_default_collate(lambda samples: default_collate(samples))
    monkeypatch.setitem(torch_collate.default_collate_fn_map, Tensor, lambda batch, *, collate_fn_map: batch[0])
    assert not is_default_collate(default_collate)


SHAPES = [(7,), (7, 1), (7, 5), (7, 0), (7, 1, 8, 8), (7, 3, 1, 1), (7, 3, 4, 5), (7, 3, 0, 2), (7, 2, 1, 3, 1), (1, 2)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda rows: rows,
    "channels_last": lambda rows: rows.to(memory_format=torch.channels_last) if rows.dim() == 4 else rows,
    "part of a larger one": lambda rows: torch.cat([rows, rows])[1 : 1 + len(rows)],
    "every second of a larger one": lambda rows: torch.cat([rows, rows])[::2],
    "one row, repeated": lambda rows: rows[:1].expand_as(rows),
    "transposed": lambda rows: rows.transpose(0, -1).contiguous().transpose(0, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_collated_as_torch_does(layout: str) -> None:
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        rows = LAYOUTS[layout](torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(9).to(dtype))
        samples = [3 % len(rows), 0, len(rows) - 1, 0]
        whole = TensorDataset(rows, torch.arange(len(rows)))
        for dataset in (whole, Subset(Subset(whole, range(len(rows))), list(range(len(rows)))[::-1])):
            collated = collated_rows(dataset, samples)
            if not rows.is_contiguous():
                assert collated is None, "torch may keep its layout, or may not"
                continue
            expected = default_collate([dataset[sample] for sample in samples])
            assert type(collated) is list is type(expected)
            for mine, its in zip(collated, expected, strict=True):
                assert (mine.dtype, mine.shape, mine.stride()) == (its.dtype, its.shape, its.stride())
                assert mine.tolist() == its.tolist()


def test_a_batch_of_rows_is_a_copy() -> None:
    batch = collated_rows(ROWS, [0, 1])
    assert batch is not None
    batch[0].zero_()
    assert ROWS.tensors[0].tolist() == torch.arange(12.0).reshape(6, 2).tolist()


def test_what_is_not_plain_is_read_one_by_one() -> None:
    plain = torch.arange(6.0)
    for tensor in (nn.Parameter(plain), plain.to_sparse()):
        assert collated_rows(TensorDataset(tensor), [0, 1]) is None
    assert collated_rows(MyRows(plain), [0, 1]) is None
    assert collated_rows([1, 2], [0, 1]) is None
