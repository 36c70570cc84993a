"""``BalancedBatches``: the arguments of balanced batches, and their checks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from unitrain.errors import ConfigError, DataError
from unitrain.features.balanced_batches.balance import Balance, costs_by


class BalancedBatches:
    """Divides each global batch so that the micro-batches of all ranks cost about the same.

    Args:
        lengths: the length of each sample, or a function of its index, for batches that are padded to their longest
            sample: the padded sizes become about equal. For an iterable dataset that every rank reads as a whole, a
            function of the sample.
        costs: the same without padding, where the costs of samples add up: packed sequences, graphs.
        max_cost: the most that a batch of one process may cost, instead of ``accumulate``. Of padded batches, the cost
            is their size times their longest sample.

    Raises:
        ConfigError: arguments contradict each other.

    Example:
        >>> by_length = BalancedBatches(lengths=[len(text) for text in texts])
        >>> train = strategy.dataloader(texts, global_batch_size=256, shuffle=True, batching=by_length)
    """

    def __init__(
        self,
        *,
        lengths: Sequence[float] | Callable[[Any], float] | None = None,
        costs: Sequence[float] | Callable[[Any], float] | None = None,
        max_cost: float | None = None,
    ) -> None:
        if (lengths is None) == (costs is None):
            raise ConfigError(
                "pass lengths (of samples that are padded to the longest of a batch) or costs (that add up), not "
                f"{'both' if costs is not None else 'neither'}."
            )
        self._name, self._given = ("costs", costs) if lengths is None else ("lengths", lengths)
        self._options: dict[str, Any] = {"padded": costs is None, "most": max_cost}

    def division(self, dataset: Any, *, is_stream: bool) -> Balance:
        """Return the division of a dataset.

        Raises:
            ConfigError: the arguments are not for a stream.
            DataError: lengths or costs are not those of the dataset's samples.
        """
        given: Any = self._given
        if is_stream:
            if not callable(given):
                raise ConfigError(
                    f"{self._name} of an iterable dataset must be a function of a sample, such as {self._name}=len."
                )
            return Balance(partial(costs_by, given), **self._options)
        samples = len(dataset)
        values = costs_by(given, range(samples)) if callable(given) else np.asarray(given, float)
        if values.shape != (samples,):
            raise DataError(
                f"{self._name} must have a number for each of the {samples} samples, but has shape "
                f"{list(values.shape)}."
            )
        # The ranks compare it, since each divides the global batches by itself.
        digest = hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
        balance = Balance(values.__getitem__, digest=digest, **self._options)
        # Now, and not when the first epoch comes to the sample: all lengths are known.
        balance.check(values)
        return balance
