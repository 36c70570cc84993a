"""The backend ddp: torch's DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence, Set
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn import Parameter

from unitrain.communication.backend import Backend
from unitrain.config import Section, StrategyConfig
from unitrain.device import devices_of
from unitrain.errors import ConfigError, UsageError
from unitrain.launch.detect import Launch

from ..process_group.backend import ProcessGroupBackend
from .module import AveragingModule
from .powersgd import add_power_sgd
from .settings import DDPSettings

_COMPILED = "_orig_mod."  # torch.compile's prefix of names
_HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


class DDPBackend(ProcessGroupBackend):
    """torch's DistributedDataParallel."""

    name = "ddp"
    Settings: ClassVar[type[Section]] = DDPSettings
    compressions: ClassVar[tuple[str, ...]] = (*Backend.compressions, "powersgd")
    gradient_reduction: Literal["sum", "mean"] = "mean"

    @classmethod
    def check(cls, config: StrategyConfig, launch: Launch) -> None:
        """Refuse a library that is not available, and small buckets if compiled.

        Raises:
            ConfigError: these settings, or this device, are not supported.
        """
        if config.compile and config.section(cls.name, DDPSettings).bucket_cap_mb < 1:
            raise ConfigError("compile needs ddp.bucket_cap_mb of at least 1: torch can't split a graph at less.")
        super().check(config, launch)

    def __init__(self, config: StrategyConfig, launch: Launch, device: torch.device) -> None:
        super().__init__(config, launch, device)
        # Weak references: a model is freed when the script drops it.
        self._wrapped: dict[weakref.ref[AveragingModule], None] = {}  # in the same order on all ranks
        # The wrapper that averages each parameter; torch ignores parameters that were frozen when it was made.
        self._averaged: dict[Parameter, weakref.ref[AveragingModule]] = {}
        self._names: dict[Parameter, str] = {}
        self._armed = True
        # They take gradients in any order, and from some ranks only. DDP rebuilds its own after the first step.
        searches = self.settings.find_unused_parameters and not self._is_low_rank
        self._uses_buckets: bool = config.deterministic or searches
        if self._uses_buckets:
            self.gradient_reduction = "sum"

    @property
    def _is_low_rank(self) -> bool:
        """Whether gradients are compressed by PowerSGD, a hook of DDP's reducer that the core's buckets don't have."""
        return self.config.compression == "powersgd"

    def close(self, *, failed: bool) -> None:
        """Destroy the process groups made here, unless that would need other ranks, which may be gone."""
        self._wrapped.clear()
        self._averaged.clear()
        self._names.clear()
        super().close(failed=failed)

    def wrap_model(self, module: nn.Module) -> nn.Module:
        """Return the module in torch's DDP; unchanged if it is frozen, on several devices, or for the core's buckets.

        Where the module is returned unchanged, the core's buckets or ``watch_gradients`` average the gradients; the
        latter don't compress them.

        Raises:
            UsageError: it shares parameters with a module that is wrapped already.
        """
        if self.world_size == 1 or self._uses_buckets or not any(p.requires_grad for p in module.parameters()):
            return module
        # torch's DDP takes GPUs only, and reduces on each of them, but this rank's NCCL is bound to one.
        if len(devices_of(module)) > 1:
            return module
        options = self.settings
        trained = {p for p in module.parameters() if p.requires_grad}
        shared = trained & self._averaged.keys()
        # Each wrapper would average the gradient of a shared parameter, when only a part of it is there.
        if shared:
            names = ", ".join(sorted(self._names[p] for p in shared))
            raise UsageError(
                f"two modules share parameters ({names}), which DDP would average twice: prepare one that has both."
            )
        wrapped = AveragingModule(
            module,
            device_ids=[self.device.index] if self.device.type != "cpu" else None,
            bucket_cap_mb=options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=True,
        )
        hook = _HOOKS.get(self.config.compression)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        elif self._is_low_rank:
            add_power_sgd(
                wrapped,
                rank=options.powersgd_rank,
                start_step=options.powersgd_start_step,
                sequential="gloo" in dist.get_backend(),
            )
        # A module may be prepared in the middle of a window.
        wrapped.require_backward_grad_sync = self._armed
        self._names.update({p: name.replace(_COMPILED, "") for name, p in module.named_parameters()})
        reference = weakref.ref(wrapped)
        self._wrapped[reference] = None
        self._averaged.update(dict.fromkeys(trained, reference))
        return wrapped

    def keep(self, parameters: Collection[Parameter]) -> None:
        """Forget all other parameters, which the script has dropped with their modules."""
        self._averaged = {p: wrapped for p, wrapped in self._averaged.items() if p in parameters}
        self._wrapped = dict.fromkeys(self._averaged.values())
        self._names = {p: name for p, name in self._names.items() if p in parameters}

    def arm(self, sync: bool) -> None:
        """Set ``require_backward_grad_sync`` of every wrapper: of these, and of modules that are prepared later.

        Args:
            sync: whether the next backward is the last of its window, so that it averages.
        """
        self._armed = sync
        for reference in self._wrapped:
            if (wrapped := reference()) is not None:
                wrapped.require_backward_grad_sync = sync

    def expect_gradients(self, parameters: Set[Parameter]) -> bool:
        """Leave the averaging to the core's buckets if a wrapper has other parameters as well: DDP waits for all.

        These were frozen since, or have another optimizer, or none. Of no parameters, the script averages gradients:
        DDP would do so once more in its next backward.
        """
        needed = {wrapped for p, wrapped in self._averaged.items() if p in parameters}
        complete = all(p in parameters for p, wrapped in self._averaged.items() if wrapped in needed)
        if (complete and parameters) or self._is_low_rank:
            return False
        wrappers = [reference() for reference in self._wrapped]
        # Each rank frees one that the script has dropped at another time.
        exist = torch.tensor([wrapped is not None for wrapped in wrappers], dtype=torch.int32, device=self.device)
        self.all_reduce(exist, "min", "wrappers")()
        for wrapped, everywhere in zip(wrappers, exist.tolist(), strict=True):
            if wrapped is not None and everywhere:
                wrapped.retire()
        self._wrapped.clear()
        self._averaged.clear()
        self._uses_buckets = True
        return True

    def watch_gradients(self, parameters: Sequence[Parameter]) -> Callable[[bool], None] | None:
        """Return a function that averages the gradients that DDP did not average within backward.

        Args:
            parameters: of one optimizer.

        Returns:
            A collective function, called at the end of a window, and told whether ``arm`` came too late for a backward.
            None if the core's buckets average.
        """
        if self._uses_buckets:
            return None
        averaged = [p for p in parameters if p in self._averaged]
        others = [p for p in parameters if p not in self._averaged]
        wrappers = list(dict.fromkeys(self._averaged[p] for p in averaged))
        counts = [(0, 0)] * len(wrappers)  # forwards of each wrapper up to the end of the previous step

        def finish(late: bool) -> None:
            """Average gradients of an unarmed backward, and of parameters that no wrapper has."""
            for i, reference in enumerate(wrappers):
                wrapper = reference()  # gone if the script calls the original module, and has dropped this one
                late = late or wrapper is None or not wrapper.has_averaged(*counts[i])
                if wrapper is not None:
                    counts[i] = (wrapper.forwards, wrapper.calls)
            if not (late or self.settings.find_unused_parameters) and (
                unused := [self._names[p] for p in averaged if p.grad is None]
            ):
                self.refuse_unused(unused, all_of_them=len(unused) == len(averaged))
            if late:
                self.average(parameters)
            elif others:
                self.average(others)
            if self.config.debug:
                # Otherwise the next forward does this, a collective that the ranks have not compared.
                for reference in wrappers:
                    if (wrapper := reference()) is not None:
                        wrapper.reducer._rebuild_buckets()

        return finish
