"""Activation checkpointing: drops the activations of blocks in the forward, and computes them again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unitrain.errors import ConfigError, UsageError, nearest
from unitrain.training.feature import Feature
from unitrain.training.models.passes import ModulePass


class ActivationCheckpointing(Feature, ModulePass):
    """Checkpoints the activations of blocks.

    Args:
        wanted: names of classes; or True for the children of each ``ModuleList`` and ``Sequential`` that have children
            themselves, since a single layer would keep its input anyway.
    """

    place = 20

    def __init__(self, wanted: bool | Sequence[str]) -> None:
        self._wanted = wanted
        self._blocks: set[nn.Module] = set()  # of the modules that are being prepared

    def inspect(self, modules: Sequence[nn.Module]) -> None:
        """Find the blocks: a class may be of one of several modules only."""
        names = set() if isinstance(self._wanted, bool) else set(self._wanted)
        self._blocks = {block for module in modules for block in _blocks(module, None, names)}
        classes = sorted({type(layer).__name__ for module in modules for layer in module.modules()})
        for name in sorted(names.difference(classes)):
            raise ConfigError(
                f"activation_checkpointing names {name!r}, but no module is of this class.{nearest(name, classes)} "
                f"There are {', '.join(classes)}. (If only one of several models has it, pass all to one prepare().)"
            )
        if not self._blocks:
            raise ConfigError(
                "activation_checkpointing is true, but there is no ModuleList or Sequential of modules that consist of "
                f"layers: name the classes of the model's blocks. There are {', '.join(classes)}."
            )
        for block in self._blocks:
            if "forward" in vars(block):  # where the checkpointed one is put
                raise ConfigError(
                    f"activation_checkpointing does not support a {type(block).__name__} whose forward is an "
                    "attribute: use a subclass."
                )

    def apply(self, module: nn.Module) -> None:
        """Checkpoint the activations of a module's blocks. The hooks of a block are not run again."""
        for block in self._blocks.intersection(module.modules()):
            self._blocks.remove(block)  # once, also if it is a part of several modules
            block.forward = partial(_checkpointed, block.forward)

    def revert(self, copy: nn.Module) -> None:
        """Give the blocks of a copy their own forward."""
        for layer in copy.modules():
            forward = vars(layer).get("forward")
            if isinstance(forward, partial) and forward.func is _checkpointed:
                del layer.forward  # the method of the class is behind it


def _blocks(module: nn.Module, parent: nn.Module | None, names: set[str]) -> Iterator[nn.Module]:
    """Yield the outermost blocks in a module: of the named classes, or else the children of a list that have some."""
    if names:
        wanted = type(module).__name__ in names
    else:
        wanted = isinstance(parent, (nn.ModuleList, nn.Sequential)) and any(module.children())
        wanted = wanted and not isinstance(module, nn.ModuleList)  # it has no forward
    if wanted:
        yield module
        return
    for child in module.children():
        yield from _blocks(child, module, names)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a block, and again in its backward, unless it changes a buffer: it would do so twice."""
    if torch.compiler.is_compiling():  # a compiler does not count changes twice
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    block: Any = getattr(forward, "__self__")  # noqa: B009  (mypy knows no such attribute)
    versions = {name: (buffer, buffer._version) for name, buffer in block.named_buffers()}
    result = checkpoint(forward, *args, use_reentrant=False, **kwargs)
    if versions and torch.is_grad_enabled():
        for name, buffer in block.named_buffers():
            known, version = versions.get(name, (None, 0))
            if known is not buffer or version != buffer._version:
                raise UsageError(
                    f"the forward of a {type(block).__name__} changes its buffer {name}, which would change again in "
                    "the backward: leave it out of activation_checkpointing, or update the buffer after the step."
                )
    return result
