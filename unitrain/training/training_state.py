"""Puts back what steps change: weights, buffers and the states of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class Copies:
    """What dicts hold, and the values of tensors, at the time when this is made.

    The same tensors are filled again, from copies on the host. Of a sharded one, ``to_local`` returns this rank's part.

    Args:
        dicts: with the tensors in them; containers in these dicts are copied as well.
        shallow: dicts with the tensors in them; containers in these stay the same.
        tensors: others.
    """

    def __init__(
        self,
        dicts: Iterable[dict[Any, Any]],
        shallow: Iterable[dict[Any, Any]] = (),
        tensors: Iterable[Tensor] = (),
        to_local: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self._contents = [(own, _copied(own)) for own in dicts]
        self._shallow = [(own, dict(own)) for own in shallow]
        found = tree_leaves([*(content for _, content in (*self._contents, *self._shallow)), *tensors])
        self.tensors: list[Tensor] = list({id(one): one for one in found if isinstance(one, Tensor)}.values())
        parts = [to_local(tensor.detach()) for tensor in self.tensors]
        self._values = [(part, part.to("cpu", copy=True)) for part in parts]

    @torch.no_grad()
    def put_back(self) -> None:
        """Put everything back."""
        for own, content in (*self._shallow, *((own, _copied(content)) for own, content in self._contents)):
            own.clear()
            own.update(content)
        for part, value in self._values:
            # One that has not changed is not written to: buffers with a new version are broadcast.
            if not torch.equal(part.cpu(), value):
                part.copy_(value)


def _copied(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of a dict, and of the dicts and lists in it, with the same tensors."""
    return {key: tree_map(lambda leaf: leaf, value) for key, value in content.items()}
