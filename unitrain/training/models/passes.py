"""``ModulePass``: a change that ``prepare`` makes to modules, beside their device and their wrapper."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class ModulePass:
    """Changes the modules that ``prepare`` is given, in place. A subclass overrides the methods that it needs.

    A module is on its device by then. Its values are not yet those of rank 0, and neither the compiler nor the backend
    has wrapped it.

    Attributes:
        place: the order among passes. Those with a smaller number are applied first, and those of one place in the
            order in which they were added. Layers that compute something else have 10, blocks that run twice 20, the
            precision 40, hooks around it 50.
        communicates: whether modules communicate within a forward and its backward from then on. Gradients are sent
            after the backward then, unless the backend matches collectives by name.
    """

    place: int = 50
    communicates: bool = False

    def inspect(self, modules: Sequence[nn.Module]) -> None:
        """Inspect all modules of a call of ``prepare``, before any of them is changed.

        Raises:
            ConfigError: one of them can't be changed as the settings say.
        """

    def apply(self, module: nn.Module) -> None:
        """Change a module that is being prepared. It may be wrapped by the compiler."""

    def revert(self, copy: nn.Module) -> None:
        """Undo ``apply`` in a copy of a module, for an export. Hooks in ``hook_handles`` are removed in any case."""
