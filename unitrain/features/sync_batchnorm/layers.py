"""BatchNorm layers with statistics of the global batch, with any backend, on CPU and GPU.

``Synchronisation`` makes layers of models such ones in ``prepare``, and plain ones again in exports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unitrain.errors import ConfigError
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets
from unitrain.training.models.batch_norm import GlobalBatchNorm, is_unsynchronised
from unitrain.training.models.passes import ModulePass

if TYPE_CHECKING:
    from unitrain.features.sync_batchnorm.ops import LayerContext


class SyncBatchNorm(GlobalBatchNorm):
    """A BatchNorm layer that computes its training statistics over the rows of all ranks.

    Made by ``Synchronisation`` from an existing layer.
    """

    plain: ClassVar[type[_BatchNorm]]
    local_forward: ClassVar[Callable[..., Tensor]]
    ranks: LayerContext
    sync_name: str

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """Normalise ``input`` (rows, channels, ...) by statistics over all ranks, or the running ones in eval mode."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if not self.training or self.ranks.communicator.world_size == 1:
            return type(self).local_forward(self, input)
        output: Tensor
        output, statistics = self.ranks.normalise(input, self.weight, self.bias, self.eps, self.sync_name)
        if self.track_running_stats:
            mean, variance, total, _ = statistics
            self.update_running(mean, variance, total)
        return output


class _OfAnyDimension(SyncBatchNorm):
    """torch's own ``SyncBatchNorm``, which needs GPUs and torch.distributed, on any device and backend."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  (torch's name)
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class _HasActivation(SyncBatchNorm):
    """timm's ``BatchNormAct2d``, which is followed by a dropout and an activation, over all ranks."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        normalised = super().forward(input)
        if not self.training or self.ranks.communicator.world_size == 1:
            return normalised  # by timm's own forward
        return cast(Tensor, self.act(self.drop(normalised)))


@lru_cache
def _synced(plain: type[nn.Module]) -> type[SyncBatchNorm] | None:
    """Return the synchronised class of a BatchNorm class; None for a subclass: its forward may be different."""
    timm = sys.modules.get("timm.layers")  # imported, if the model has layers of it
    attributes: dict[str, Any] = {"plain": plain, "local_forward": plain.forward}
    bases: tuple[type, ...]
    if plain in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        bases = (SyncBatchNorm, plain)
    elif plain is nn.SyncBatchNorm:
        bases = (_OfAnyDimension,)  # torch's DDP refuses subclasses of its own on CPUs
        attributes["local_forward"] = _BatchNorm.forward
    elif timm is not None and plain is timm.BatchNormAct2d:
        bases = (_HasActivation, nn.BatchNorm2d)
    else:
        return None
    return type(f"Sync{plain.__name__}", bases, attributes)


class Synchronisation(Feature, ModulePass):
    """Lets BatchNorm layers compute their statistics over the global batch.

    Args:
        only_torchs: synchronise torch's own ``SyncBatchNorm`` layers only, which the script has put there.
    """

    place = 10

    def __init__(self, *, only_torchs: bool) -> None:
        self._only_torchs = only_torchs
        self.communicates: bool = not only_torchs

    def plug_in(self, sockets: Sockets) -> None:
        """Plug this into a run."""
        self._sockets = sockets
        super().plug_in(sockets)

    def apply(self, module: nn.Module) -> None:
        """Change the classes of a module's layers: their parameters, buffers, hooks and state dict keys stay the same.

        Raises:
            ConfigError: the statistics of a layer can't be computed over all ranks.
        """
        # Without a compiler's wrapper, which would change the layers' names in calls.
        layers: list[tuple[str, Any]] = [
            (name, layer)
            for name, layer in self._sockets.prepared.unwrap(module).named_modules()
            if isinstance(layer, _BatchNorm)
            and is_unsynchronised(layer)
            and (not self._only_torchs or type(layer) is nn.SyncBatchNorm)
        ]
        if not layers:
            return
        from unitrain.features.sync_batchnorm.ops import LayerContext  # imports the compiler, which takes a while

        ranks = LayerContext(self._sockets.communicator, self._sockets.batches.current_batch)
        for name, layer in layers:
            if getattr(layer, "process_group", None) is not None:
                raise ConfigError(
                    f"layer {name!r} has a process group, which is not supported: create it without process_group."
                )
            synced = _synced(layer.__class__)
            if synced is None:
                raise ConfigError(
                    f"sync_batchnorm does not support layer {name!r} of class {type(layer).__name__}: it supports only "
                    "BatchNorm1d, 2d and 3d and timm's BatchNormAct2d. Replace it, or set sync_batchnorm to false."
                )
            layer.__class__ = synced
            layer.__dict__.update(ranks=ranks, sync_name=f"batch_norm.{name}")

    def revert(self, copy: nn.Module) -> None:
        """Make the layers of a copy those that they were, with the statistics of now."""
        for layer in copy.modules():
            if isinstance(layer, SyncBatchNorm):
                del layer.ranks, layer.sync_name
                layer.__class__ = layer.plain  # type: ignore[assignment]
