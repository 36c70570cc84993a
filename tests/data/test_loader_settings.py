"""Arguments of ``strategy.dataloader``: their checks, and the conversion of a DataLoader."""

from __future__ import annotations

from typing import Any

import pytest
from pretended import pretended_rank
from torch.utils.data import DataLoader

from unitrain import ConfigError, DataError, Strategy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of global_batch_size .* and batch_size .*; got None and None"),
        ({"batch_size": 2, "global_batch_size": 4}, "got 4 and 2"),
        ({"batch_size": 0}, "at least 1, not 0"),
        ({"batch_size": 2.0}, "at least 1, not 2.0"),
        ({"batch_size": True}, "at least 1, not True"),
        ({"global_batch_size": -1}, "at least 1, not -1"),
        ({"batch_size": 2, "num_wokers": 2}, "no argument 'num_wokers'. Did you mean 'num_workers'"),
        ({"batch_size": 2, "generator": 3}, "no argument 'generator'. Of DataLoader's, it takes collate_fn, "),
        ({"batch_size": 2, "sharded": True}, "sharded and shards are for iterable datasets"),
    ],
)
def test_wrong_settings(strategy: Strategy, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strategy.dataloader([1, 2, 3], **settings)


def test_a_batch_smaller_than_its_micro_batches() -> None:
    with pytest.raises(ConfigError, match="global_batch_size 3 can't be split into accumulate=4 micro-batches"):
        pretended_rank(accumulate=4).dataloader([1, 2, 3], global_batch_size=3)


class WithoutLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "the loader has no batches: 0 samples"),
        (WithoutLength(), "WithoutLength has no __len__"),
        ((i for i in range(3)), "a generator is an iterator, which can be read only once"),
        (7, "int is not a dataset"),
        (None, "NoneType is not a dataset"),
    ],
)
def test_wrong_datasets(strategy: Strategy, dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        strategy.dataloader(dataset, batch_size=2)


ORDERS: list[dict[str, Any]] = [{"shuffle": True}, {"sampler": [1, 2]}, {"drop_last": True}, {"batch_sampler": [[1]]}]


@pytest.mark.parametrize("given", ORDERS, ids=lambda given: next(iter(given)))
def test_what_a_dataloader_decides_is_not_given_again(strategy: Strategy, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(given))}.*DataLoader"):
        strategy.dataloader(DataLoader([1, 2, 3], batch_size=2), **given)  # type: ignore[arg-type]
