"""What a loader reads from has batches, or the loader says why not."""

from __future__ import annotations

import pytest
from plain_loop import strategy_of

from unitrain import DataError


def test_a_loader_without_batches_is_refused() -> None:
    strategy = strategy_of()
    with pytest.raises(DataError, match="3 samples, a global batch size of 4, drop_last=True"):
        strategy.dataloader([1, 2, 3], batch_size=4, drop_last=True)
    with pytest.raises(DataError, match="the loader has no batches: 0 samples"):
        strategy.dataloader([1, 2, 3], batch_sampler=[])
