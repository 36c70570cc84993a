"""``CountReduction``: reduces a few integers over the ranks without waiting for the computation.

On a GPU, to copy them there from the host, and to read the result, would each wait for all that is queued on the
compute stream. So these copies have their own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from unitrain.communication.communicator import Communicator
from unitrain.device import streams_of


class CountReduction:
    """An asynchronous reduction of integers, one at a time."""

    def __init__(self, communicator: Communicator, op: Literal["sum", "max"], name: str) -> None:
        self._collectives = communicator.collectives
        self._op = op
        self._name = name
        self._streams = streams_of(communicator.device)
        self._stream = None if self._streams is None else self._streams.Stream(communicator.device)

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start to reduce values, and return a function that waits for the results. Collective."""
        with self._on_own_stream():
            tensor = torch.tensor(values, dtype=torch.int64, device=self._collectives.device)
            wait = self._collectives.all_reduce_async(tensor, self._op, self._name)

        def results() -> list[int]:
            with self._on_own_stream():
                wait()
                reduced: list[int] = tensor.tolist()  # waits for this stream only, and not for the step
                return reduced

        return results

    def _on_own_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._streams is None else self._streams.stream(self._stream)
