"""The backend fsdp: torch's fully_shard. Each rank has a shard of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from unitrain.config import Section, StrategyConfig
from unitrain.device import HALF_DTYPES, devices_of
from unitrain.errors import BackendError, ConfigError, UsageError
from unitrain.launch.detect import Launch
from unitrain.process import return_freed_memory, trim_heap

from ..process_group.backend import ProcessGroupBackend
from .settings import LARGE, FSDPSettings

if TYPE_CHECKING:  # importing it takes a while, which scripts with other backends need not wait for
    from torch.distributed.device_mesh import DeviceMesh

    from .sharding import FSDPSharding


class FSDPBackend(ProcessGroupBackend):
    """torch's fully_shard. The core's collectives use a separate process group.

    Attributes:
        sharding: the sharded modules, and the way from a parameter to its shard.
    """

    name = "fsdp"
    Settings: ClassVar[type[Section]] = FSDPSettings
    gradient_reduction: Literal["sum", "mean"] = "mean"
    shards: ClassVar[bool] = True

    @classmethod
    def check(cls, config: StrategyConfig, launch: Launch) -> None:
        """Refuse a library that is not available, a torch that is too old, and settings that this job can't have.

        Raises:
            BackendError: torch is too old.
            ConfigError: these settings are not supported here.
        """
        super().check(config, launch)
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise BackendError(
                f"backend fsdp needs torch 2.13 or newer, and this is {torch.__version__}: update it, or use ddp."
            )
        by_host = config.section(cls.name, FSDPSettings).shards == "host"
        if by_host and launch.world_size % launch.local_world_size:
            raise ConfigError(
                f"fsdp.shards is host, which needs the same number of processes on every host, but the job has "
                f"{launch.world_size}, and this host {launch.local_world_size}. Set fsdp.shards to all."
            )

    def __init__(self, config: StrategyConfig, launch: Launch, device: torch.device) -> None:
        super().__init__(config, launch, device)
        from .sharding import FSDPSharding

        replicas = self.world_size // launch.local_world_size if self.settings.shards == "host" else 1
        self.sharding: FSDPSharding = FSDPSharding(of_parameters=self.world_size > 1, replicas=replicas)
        self._names: dict[Parameter, str] = {}
        self._armed = True
        self._mesh: DeviceMesh | None = None

    def start(self) -> tuple[int, int]:
        """Initialise the process group, and the groups that shard and replicate parameters."""
        world = super().start()
        if self.world_size > 1:
            if self.device.type == "cpu":
                return_freed_memory(LARGE)  # units of the same sizes come and go, among shards
            self._mesh = self._make_mesh()
        return world

    def _make_mesh(self) -> DeviceMesh:
        """Return the device mesh: a dimension that shards, and before it one that replicates, if needed. Collective."""
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        # A mesh of one dimension: FSDP2 takes two for its hybrid sharding.
        if self.sharding.replicas == 1:
            return init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("shard",))
        # torch would give its own groups its own timeout: with NCCL, 10 minutes.
        ranks = torch.arange(self.world_size).view(self.sharding.replicas, -1)
        groups: list[Any] = [
            dist.new_subgroups_by_enumeration(ranks_of_groups.tolist(), timeout=self.timeout)[0]
            for ranks_of_groups in (ranks.T, ranks)
        ]
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=("replicate", "shard"))

    def close(self, *, failed: bool) -> None:
        """Destroy the process groups made here. A sharded module can't be called any more."""
        for sharded in self.sharding.existing():
            # Instead of an error deep inside torch.
            sharded.refuse_calls()
        self.sharding.module_of.clear()
        self.sharding.used.clear()
        super().close(failed=failed)

    def place(self, module: nn.Module) -> None:
        """Leave it to ``wrap_model``, which moves a part of the module at a time.

        Raises:
            UsageError: the module is on several devices.
        """
        if self._mesh is None:
            super().place(module)
            return
        spread = devices_of(module)
        if len(spread) > 1:
            raise UsageError(
                f"the model's layers are on {', '.join(map(str, spread))}, but FSDP has the shards of a rank on its "
                "one device: build the model there, or on the CPU, or use backend ddp, which leaves it as it is."
            )

    def wrap_model(self, module: nn.Module) -> nn.Module:
        """Shard a module in place, and return it. Collective.

        Raises:
            UsageError: it is a container without a forward.
        """
        if self._mesh is None:
            return module
        original = getattr(module, "_orig_mod", module)  # of torch.compile
        if isinstance(original, (nn.ModuleList, nn.ModuleDict)):
            raise UsageError(
                f"a {type(original).__name__} has no forward that could gather its weights: prepare what is in it."
            )
        if not any(True for _ in original.parameters()):
            return module.to(self.device)
        from .module import ShardedModule

        sharded = ShardedModule(
            original,
            self._mesh,
            self.device,
            self.settings,
            self.pulse,
            compute_dtype=HALF_DTYPES.get(self.config.precision),
            reduce_dtype=HALF_DTYPES.get(self.config.compression),
            has_mean="nccl" in dist.get_backend(),
        )
        trim_heap()  # glibc would keep most of the whole model's memory
        sharded.arm(self._armed)
        self.sharding.modules[original] = reference = ref(sharded)
        self.sharding.module_of.update({p: reference for p in original.parameters() if p not in sharded.replicated})
        self._names.update({p: name for name, p in original.named_parameters()})
        return module

    def arm(self, sync: bool) -> None:
        """Set whether the next backward reduces gradients.

        Args:
            sync: whether it is the last of its window. Without it, gradients are accumulated unsharded.
        """
        self._armed = sync
        for sharded in self.sharding.existing():
            sharded.arm(sync)

    def keep(self, parameters: Collection[Parameter]) -> None:
        """Forget all other parameters, which the script has dropped with their modules."""
        self.sharding.keep(parameters)
        self._names = {p: name for p, name in self._names.items() if p in parameters}

    def watch_gradients(self, parameters: Sequence[Parameter]) -> Callable[[bool], None] | None:
        """Return a function that completes FSDP's reduction of the gradients after the backwards of a window.

        Args:
            parameters: of one optimizer.

        Returns:
            A collective function; None if there are no parameters.
        """
        sharded = [p for p in parameters if p in self.sharding.module_of]
        others = [p for p in parameters if p not in self.sharding.module_of]
        if not sharded and not others:
            return None
        # The whole parameter is a leaf of the graph, and the shard is not.
        leaves = [self.sharding.leaf(parameter) for parameter in sharded]
        for parameter, leaf in zip(sharded, leaves, strict=True):
            leaf.register_post_accumulate_grad_hook(partial(self._note_used, parameter))  # type: ignore[no-untyped-call]

        def finish(late: bool) -> None:
            """Set ``grad`` to None where FSDP has reduced zeros only, and average the gradients of whole parameters."""
            searches = self.settings.find_unused_parameters
            used = [p in self.sharding.used for p in sharded]
            unused = [self._names[p] for p, is_used in zip(sharded, used, strict=True) if not is_used]
            if unused and (not searches or len(unused) == sum(p.requires_grad for p in self.sharding.module_of)):
                # Ranks that use some of them wait in their backward for this one.
                self.refuse_unused(unused, all_of_them=len(unused) == len(sharded), searches=True)
            # A gradient of a gradient reaches a unit without its hooks, or after they have reduced it.
            left = any(leaf.grad is not None for leaf in leaves)
            if searches:
                # A parameter that any rank has used has a gradient on all, as one device would have it.
                *used, left = self.on_any_rank([*used, left])
            # The optimizer changes the shards: what a forward has gathered would be stale after it.
            # By id: a reference to a module that is gone has no hash.
            known = [self.sharding.module_of[p] for p in sharded if p in self.sharding.module_of]
            references = {id(reference): reference for reference in known}
            for module in (module for reference in references.values() if (module := reference()) is not None):
                if left:
                    module.reduce_rest()
                    module.arm(self._armed)
                module.reshard()
            for parameter, is_used in zip(sharded, used, strict=True):
                if not is_used:
                    parameter.grad = None
            self.sharding.used.difference_update(sharded)
            if others:
                self.average(others)

        return finish

    def _note_used(self, parameter: Parameter, leaf: Tensor) -> None:
        """Note that a parameter has got a gradient. A hook of its leaf, called in autograd's thread."""
        self.sharding.used.add(parameter)
        if leaf.grad is not None and leaf.grad.is_sparse:
            raise UsageError(
                f"{self._names[parameter]} has a sparse gradient, which FSDP lacks: create its layer with sparse=False."
            )
