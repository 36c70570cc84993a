"""A module that is sharded by torch's fully_shard, with the core's view of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn import Parameter

from unitrain.communication.structure import tensors
from unitrain.errors import UsageError
from unitrain.module_copy import add_hooks, move_foreign, without_memory
from unitrain.pulse import USER_CODE, Pulse
from unitrain.training.models.materialising import give_memory

from .changes import ForwardChanges, check_output, eager, explain_methods, name_layer, refuse_assigned, refuse_tied
from .settings import FSDPSettings
from .shards import full_tensor, to_local
from .units import converted_by_autocast, not_divisible, units

_METHOD = "unitrain_empty"
_OWNED = "unitrain_sharded"


class ShardedModule:
    """Shards a module in place, one unit after the other: only one has whole weights on the device at a time.

    Args:
        module: has the same weights on all ranks, on the device or the CPU.
        mesh: the ranks to shard over, and those that have the same shards.
        device: this rank's device.
        settings: say which units are gathered, and when they are freed.
        pulse: records that this rank waits for the others to gather a unit.
        compute_dtype: the dtype of autocast, in which weights are gathered where autocast would convert them.
        reduce_dtype: the dtype in which gradients are reduced; None for their own.
        has_mean: whether the communication library can average, instead of sum.

    Attributes:
        replicated: the parameters that can't be sharded, which every rank has whole.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        settings: FSDPSettings,
        pulse: Pulse,
        *,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        has_mean: bool,
    ) -> None:
        self._device = device
        # An export is filled into a copy of the module as it was, without hooks of FSDP.
        self._skeleton = without_memory(module, [*module.parameters(), *module.buffers()])
        # On the meta device, parameters have no memory yet. The whole ones get theirs first.
        give_memory(module, device, only=not_divisible(module))
        self.replicated: set[Parameter] = not_divisible(module)
        move_foreign(self.replicated, device)
        for parameter in self.replicated:
            parameter.data = parameter.data.to(device)
        whole_parameters = dict(module.named_parameters())
        # Ranks that use different units would wait for one another.
        wrap = () if settings.find_unused_parameters else settings.wrap
        changes: dict[object, ForwardChanges] = {}
        shard = partial(
            fully_shard,
            mesh=mesh,
            reshard_after_forward=settings.reshard_after_forward,
            mp_policy=_policy(module, compute_dtype, reduce_dtype),
            ignored_params=self.replicated,
        )
        for unit in (*units(module, wrap), module):
            give_memory(unit, device)  # until it is sharded; values come later
            changes[unit] = ForwardChanges(unit)
            if settings.reshard_after_forward:
                unit.register_forward_hook(eager(check_output))
            self._divide(unit, shard)
        for method in ("__deepcopy__", "__reduce_ex__"):
            setattr(type(module), method, _refuse_copy)  # of the subclass that FSDP has made for sharded modules
        self._module: nn.Module = module
        object.__setattr__(module, _OWNED, self)  # which is freed with the module
        units_by_name = {name: unit for name, unit in module.named_modules() if isinstance(unit, FSDPModule)}
        self._units: list[FSDPModule] = list(units_by_name.values())  # first of all the module
        for name, fsdp_unit in units_by_name.items():
            _record_gathering(fsdp_unit, name or "the model", pulse)
            if not has_mean:
                # gloo has no mean: FSDP divides the sum by itself then.
                fsdp_unit.set_force_sum_reduction_for_comms(True)
            if device.type == "cpu":
                # The next unit could be gathered before this one's backward, but gloo would block meanwhile.
                fsdp_unit.set_modules_to_backward_prefetch([fsdp_unit])
        # FSDP takes the first module that is called for the root.
        with torch.no_grad():
            _run_empty_forward(module)
        self.reshard()
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        self._leaves: dict[Tensor, Tensor] = {}
        for fsdp_unit in self._units:
            gathered = dict(_gathered_by(fsdp_unit))
            self._leaves.update(gathered)
            changes[fsdp_unit].watch((names[parameter], leaf) for parameter, leaf in gathered.items())
            refuse_assigned(fsdp_unit, gathered, names)
        for name, parameter in module.named_parameters():
            if whole_parameters[name] is not parameter:
                self._move_hooks(whole_parameters[name], parameter)
                for method in ("register_hook", "register_post_accumulate_grad_hook"):
                    # Autograd never reaches the shard.
                    setattr(parameter, method, partial(_register, parameter, self._leaves[parameter], method))
        self._units[0].set_reshard_after_backward(settings.reshard_after_backward)
        if not settings.reshard_after_forward:
            module.register_forward_hook(self._reshard_without_grad)
        # Ranks that use different parameters reduce the same ones.
        self._units[0].set_reduce_scatter_unused_params(True)
        refuse_tied(module)
        module.register_forward_hook(eager(name_layer), always_call=True)
        explain_methods(module)

    def _divide(self, unit: nn.Module, shard: Callable[[nn.Module], object]) -> None:
        """Shard the parameters of a unit that are not sharded yet."""
        dense = [p for p in unit.parameters() if to_local(p) is p and p not in self.replicated]
        move_foreign([*dense, *unit.buffers()], self._device)
        for parameter in dense:
            parameter.data = parameter.data.contiguous()  # of channels_last, say
        shard(unit)
        for parameter in dense:
            # Whoever uses it still must fail, and not train apart. It must not take memory, either.
            parameter.grad = None
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def _move_hooks(self, old: Parameter, new: Parameter) -> None:
        """Call the hooks of the script, as before, with the local gradient."""
        leaf = self.leaf(new)
        leaf.requires_grad_(True)  # a hook can't be added otherwise
        add_hooks(leaf, of=old)
        leaf.requires_grad_(new.requires_grad)

    def leaf(self, parameter: Tensor) -> Tensor:
        """Return the leaf of the graph for a sharded parameter.

        Args:
            parameter: a sharded parameter of this module, a DTensor.
        """
        return self._leaves[parameter].requires_grad_(parameter.requires_grad)  # the script may have changed it

    def reshard(self) -> None:
        """Free the whole weights of all units, before the weights change."""
        for unit in self._units:
            unit.reshard()

    def _reshard_without_grad(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free whole weights that no backward will free: a hook of the module's forward."""
        # In an object that can't be opened, there may be outputs that need a backward if the parameters do.
        outputs = list(tensors(output, opened=True)) or self._leaves
        if not any(tensor.requires_grad for tensor in outputs):
            self.reshard()

    def arm(self, sync: bool) -> None:
        """Set whether the next backward reduces gradients, or accumulates them."""
        self._units[0].set_requires_gradient_sync(sync)
        self._units[0].set_is_last_backward(sync)

    def reduce_rest(self) -> None:
        """Reduce the gradients that whole parameters still have after a backward. Collective.

        The units' hooks do this at the end of another backward, for those that it does not reach, too.
        """
        self.arm(True)
        _run_empty_forward(self._module).backward()  # type: ignore[no-untyped-call]

    def refuse_calls(self) -> None:
        """Make the forward raise an error from now on: its weights can't be gathered without a process group."""

        def refuse(module: nn.Module, args: Any) -> None:
            raise UsageError(
                "a sharded model's weights can't be gathered after strategy.close(): call it, or export() it, before."
            )

        self._module.register_forward_pre_hook(refuse, prepend=True)

    def copy(self) -> nn.Module:
        """Return a copy of the module before it was sharded, with the weights of now, on the CPU. Collective."""
        self.reshard()  # a forward may have left weights as it gathered them: in bf16, say
        now: dict[str, Tensor] = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        # A deep copy takes the tensors in its memo for the copies of those in the skeleton, which have no memory.
        memo: dict[int, Any] = {}
        for name, parameter in self._skeleton.named_parameters():
            memo[id(parameter)] = Parameter(full_tensor(now[name].detach()).cpu().clone(), now[name].requires_grad)
        for name, buffer in self._skeleton.named_buffers():
            memo[id(buffer)] = now[name].detach().cpu().clone()
        return copy.deepcopy(self._skeleton, memo)


def _register(parameter: Parameter, leaf: Tensor, method: str, hook: Callable[[Tensor], Any]) -> Any:
    """Register a hook of a shard with its leaf, and return the handle."""
    return getattr(leaf.requires_grad_(parameter.requires_grad), method)(hook)


def _record_gathering(unit: Any, name: str, pulse: Pulse) -> None:
    """Record in the pulse when a forward waits for the other ranks, which may make fewer of them, to gather a unit."""
    phase = f"gathering the weights of {name}"

    def begin(module: nn.Module, args: Any) -> None:
        if pulse.phase is USER_CODE:  # and no backward that runs the forward again
            pulse.phase = phase
            pulse.calls += 1

    def end(module: nn.Module, args: Any) -> None:
        if pulse.phase is phase:
            pulse.phase = USER_CODE

    # Before the hook of fully_shard that gathers, and after it.
    unit.register_forward_pre_hook(eager(begin), prepend=True)
    unit.register_forward_pre_hook(eager(end))


def _gathered_by(unit: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each shard that is gathered with a unit, and the leaf of the graph, which is the same in all steps."""
    shards = dict(unit.named_parameters())
    unit.unshard()
    for name, whole in unit.named_parameters():
        if whole is not shards[name]:
            yield shards[name], whole
    unit.reshard()


def _run_empty_forward(module: nn.Module) -> Tensor:
    """Run the hooks that FSDP has for a forward, without computing anything. Return an output with a graph."""
    setattr(module, _METHOD, lambda: torch.zeros((), requires_grad=True) * 1)
    register_fsdp_forward_method(module, _METHOD)
    output: Tensor = getattr(module, _METHOD)()
    delattr(module, _METHOD)
    return output


def _policy(
    module: nn.Module, compute_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> MixedPrecisionPolicy:
    """Return the dtypes in which weights are gathered and gradients reduced. Autocast chooses the forward's.

    Args:
        module: says which parameters autocast would convert.
        compute_dtype: as in ``ShardedModule``.
        reduce_dtype: as in ``ShardedModule``.
    """
    if compute_dtype is None or not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"):  # torch 2.15
        return MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    converted = converted_by_autocast(module)
    override: dict[str, Any] = {
        "param_dtype_override_fn": lambda p: None if p in converted and p.dtype == torch.float32 else p.dtype
    }
    return MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False, **override)


def _refuse_copy(module: nn.Module, argument: Any) -> NoReturn:
    """Raise UsageError: copying a DTensor would copy this rank's shard only. Called by a deep copy, and by pickle."""
    raise UsageError("a sharded model can't be deep-copied or pickled: use strategy.export(model), a copy that can.")
