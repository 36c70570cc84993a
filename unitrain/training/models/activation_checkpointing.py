"""Activation checkpointing: what a block computed in the forward is dropped, and computed again in the backward.

A recomputation must not count anything twice, and must find what the forward found. So it runs on copies of the buffers
that the forward changes (BatchNorm's statistics, say), with the values from before the forward. What synchronised
BatchNorm gathered from the other ranks is kept, a few numbers per channel: there is no collective in a recomputation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from unitrain.data.loop import BatchInUse
from unitrain.errors import ConfigError, nearest
from unitrain.training.batch_norm.ops import STATISTICS_OP, Statistics, exchange


class Checkpointed(nn.Module):
    """Base class of the blocks whose activations are computed again. Made by ``apply`` from existing modules."""

    plain: ClassVar[type[nn.Module]]
    checkpointing: _Checkpointing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, and again in its backward."""
        compiles = torch.compiler.is_compiling()
        contexts = self.checkpointing.contexts if compiles else partial(_contexts, self)
        return checkpoint(self._run, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain.forward(self, *args, **kwargs)


class _Checkpointing:
    """The state of a block.

    Args:
        block: the block.
        in_use: the batch that the script works on.

    Attributes:
        in_use: as given.
        moving: names of the buffers that a forward changes; None before the first.
        contexts: makes the contexts of a forward and its recomputation where a compiler traces them. A function, which
            all versions of the compiler accept. A compiler does not count changes of buffers twice, but has to keep
            what was gathered from other ranks. It may also leave a block to be run as it is.
    """

    def __init__(self, block: Checkpointed, in_use: BatchInUse) -> None:
        self._block = block
        self.in_use: BatchInUse = in_use
        self.moving: set[str] | None = None

        def contexts() -> Any:
            if torch.compiler.is_compiling():
                return create_selective_checkpoint_contexts([STATISTICS_OP])  # type: ignore[no-untyped-call]
            return _contexts(block)

        self.contexts: Callable[[], Any] = contexts

    def __deepcopy__(self, memo: dict[int, Any]) -> _Checkpointing:
        return _Checkpointing(copy.deepcopy(self._block, memo), self.in_use)


def blocks(modules: Sequence[nn.Module], wanted: bool | Sequence[str]) -> list[nn.Module]:
    """Return the outermost modules to checkpoint.

    Args:
        modules: the models.
        wanted: names of classes; or True for the children of each ``ModuleList`` and ``Sequential`` that have children
            themselves, since a single layer would keep its input all the same.

    Raises:
        ConfigError: there are none, or a name matches no module.
    """
    names = set() if isinstance(wanted, bool) else set(wanted)
    found: dict[nn.Module, None] = {}
    for module in modules:
        _find(module, None, names, found)
    classes = sorted({type(layer).__name__ for module in modules for layer in module.modules()})
    for name in sorted(names.difference(classes)):
        raise ConfigError(
            f"activation_checkpointing names {name!r}, but no module is of this class.{nearest(name, classes)} There "
            f"are {', '.join(classes)}. (If only one of several models has it, pass all to one prepare().)"
        )
    if not found:
        raise ConfigError(
            "activation_checkpointing is true, but there is no ModuleList or Sequential of modules that consist of "
            f"layers: name the classes of the model's blocks. There are {', '.join(classes)}."
        )
    return list(found)


def _find(module: nn.Module, parent: nn.Module | None, names: set[str], found: dict[nn.Module, None]) -> None:
    if names:
        wanted = type(module).__name__ in names
    else:
        wanted = isinstance(parent, (nn.ModuleList, nn.Sequential)) and any(module.children())
        wanted = wanted and not isinstance(module, nn.ModuleList)  # it has no forward
    if wanted:
        found[module] = None
        return
    for child in module.children():
        _find(child, module, names, found)


def apply(block: nn.Module, in_use: BatchInUse) -> None:
    """Checkpoint the activations of a block, in place.

    Only its class changes: parameters, buffers, hooks and state dict keys stay the same. The hooks of the block itself
    are not run again.

    Args:
        block: the block.
        in_use: the batch that the script works on.

    Raises:
        ConfigError: its forward was replaced by an attribute.
    """
    kind = type(block)
    if "forward" in vars(block):
        raise ConfigError(
            f"activation_checkpointing does not support a {kind.__name__} whose forward was replaced by an attribute: "
            "override forward in a subclass."
        )
    if kind not in _classes:
        _classes[kind] = type(f"Checkpointed{kind.__name__}", (Checkpointed, kind), {"plain": kind})
    block.__class__ = _classes[kind]
    assert isinstance(block, Checkpointed)
    block.__dict__["checkpointing"] = _Checkpointing(block, in_use)


_classes: dict[type[nn.Module], type[Checkpointed]] = {}


def revert(module: nn.Module) -> None:
    """Undo ``apply`` in all modules of a model, in place."""
    for layer in module.modules():
        if isinstance(layer, Checkpointed):
            del layer.checkpointing
            layer.__class__ = layer.plain  # type: ignore[assignment]


def _contexts(block: Checkpointed) -> tuple[_Forward, _Recomputation]:
    forward = _Forward(block)
    return forward, _Recomputation(forward)


class _Forward:
    """Remembers what a recomputation needs, beside the inputs and the state of random numbers, which torch keeps."""

    def __init__(self, block: Checkpointed) -> None:
        self.block = block
        self.is_stand_in = block.checkpointing.in_use.is_stand_in
        self.gathered: list[Statistics] = []
        self.before: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        moving = self.block.checkpointing.moving
        self._seen = {name: (buffer, buffer._version) for name, buffer in self.block.named_buffers()}
        self.before = {name: b.clone() for name, (b, _) in self._seen.items() if moving is None or name in moving}
        self._outer, exchange.record = exchange.record, self.gathered

    def __exit__(self, *error: object) -> None:
        exchange.record = self._outer
        now = dict(self.block.named_buffers())
        moving = {name for name, (b, version) in self._seen.items() if now.get(name) is not b or b._version > version}
        known = self.block.checkpointing.moving
        moving |= _statistics(self.block) if known is None else known
        self.block.checkpointing.moving = moving
        self.before = {name: b for name, b in self.before.items() if name in moving}
        del self._seen, self._outer


class _Recomputation:
    """Gives the block what its forward found, and afterwards what it has now."""

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward

    def __enter__(self) -> None:
        forward, in_use = self._forward, self._forward.block.checkpointing.in_use
        self._now = in_use.is_stand_in, {name: forward.block.get_buffer(name) for name in forward.before}
        in_use.is_stand_in = forward.is_stand_in
        _set_buffers(forward.block, {name: buffer.clone() for name, buffer in forward.before.items()})
        exchange.replay = iter(forward.gathered)

    def __exit__(self, *error: object) -> None:
        exchange.replay = None
        self._forward.block.checkpointing.in_use.is_stand_in, buffers = self._now
        _set_buffers(self._forward.block, buffers)
        del self._now


def _statistics(block: nn.Module) -> set[str]:
    """Return the names of the buffers of BatchNorm and its like, whose kernels don't raise the version of a tensor."""
    return {
        f"{path}.{name}" if path else name
        for path, layer in block.named_modules()
        if isinstance(layer, _NormBase)
        for name in layer._buffers
    }


def _set_buffers(block: nn.Module, buffers: dict[str, Tensor]) -> None:
    for path, buffer in buffers.items():
        layer, _, name = path.rpartition(".")
        block.get_submodule(layer)._buffers[name] = buffer
