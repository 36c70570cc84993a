"""The files with shards of one checkpoint, as one rank sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from unitrain.checkpoint.sharded.shards import Content, lengths


class ShardFiles:
    """The files with shards. A rank loads those that it needs, and knows the numbers of rows in the others.

    Args:
        names: their names.
        load: returns the contents of files, given their names, by name without ending. Tensors are read when used.

    Attributes:
        rows: the numbers of rows in files that other ranks have loaded, by name without ending.
    """

    def __init__(self, names: Sequence[str], load: Callable[[Sequence[str]], Mapping[str, Content]]) -> None:
        self._files = {name.removesuffix(".pt"): name for name in sorted(names)}
        self._load = load
        self._loaded: dict[str, Content] = {}
        self.rows: dict[str, Content] = {}

    def fetch(self, numbers: Iterable[int]) -> None:
        """Load files, by their numbers in the order of the ranks that wrote them, unless that has been done.

        Raises:
            DamagedError: one is missing or changed.
            CheckpointError: one can't be read.
        """
        names = list(self._files)
        new = [name for number in sorted(set(numbers)) if (name := names[number]) not in self._loaded]
        if new:
            self._loaded.update(self._load([self._files[name] for name in new]))

    def contents(self) -> dict[str, Content]:
        """Return the content of each file, or the numbers of rows in it, in the order of the ranks that wrote them."""
        known = {**self.rows, **self._loaded}
        return {name: known[name] for name in self._files}

    def loaded_rows(self) -> dict[str, Content]:
        """Return the numbers of rows in the files that this rank has loaded."""
        return {name: lengths(content) for name, content in self._loaded.items()}
