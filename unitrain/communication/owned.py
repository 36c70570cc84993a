"""``OwnedBy``: stands for state that another rank has."""

from __future__ import annotations

from typing import Any, NoReturn

from unitrain.errors import UsageError


class OwnedBy:
    """Stands, in the state dict of an optimizer, for the state of a parameter that another rank updates.

    It can't be copied, pickled or loaded: what is made of it would lose the state, which ``rank`` has, if it has any.
    """

    def __init__(self, rank: int) -> None:
        self.rank: int = rank

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled and copied."""
        refuse()

    def __iter__(self) -> NoReturn:
        """Refuse to be loaded by an optimizer, which looks for tensors in it."""
        refuse()

    def __repr__(self) -> str:
        """Return the rank."""
        return f"OwnedBy({self.rank})"


def refuse() -> NoReturn:
    """Raise UsageError: a copy would lose the state that other ranks own."""
    raise UsageError("each rank has only a part of this optimizer's state: use strategy.checkpoint or strategy.save.")
