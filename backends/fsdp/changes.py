"""Refuses misuses of a sharded model: changing or tying weights, using them uncalled, saving or generating alone."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unitrain.call_site import is_user_code
from unitrain.errors import UsageError

eager: Callable[[Any], Any] = torch.compiler.disable
"""Has a hook run outside of compiled code, as the hooks of fully_shard do."""


class ForwardChanges:
    """Refuses a forward that changes weights: they are whole copies, which are dropped after it, and the shards stay.

    Its hooks must run within the hooks of fully_shard, which gather the weights and drop them: create it just before.

    Args:
        unit: a module that FSDP gathers as one.
    """

    def __init__(self, unit: nn.Module) -> None:
        self._weights: dict[str, Tensor] = {}
        self._noted: list[tuple[int, int]] | None = None  # None outside a forward
        # Compiled code changes weights in place, too.
        unit.register_forward_pre_hook(eager(self._note))
        unit.register_forward_hook(eager(self._check))

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set the parameters that the unit gathers.

        Args:
            weights: names and whole parameters.
        """
        self._weights = dict(weights)

    def _state(self) -> list[tuple[int, int]]:
        """Return a version and an address for each weight, one of them new after every change."""
        # The version counts changes in place, and `weight.data = ...` changes where the values are.
        return [(weight._version, weight.data_ptr()) for weight in self._weights.values()]

    def _note(self, module: nn.Module, args: Any) -> None:
        """Remember the state of the weights. A hook that runs once they are gathered."""
        self._noted = self._state()

    def _check(self, module: nn.Module, args: Any, output: Any) -> None:
        """Raise UsageError if a weight has changed since ``_note``. A hook that runs before they are dropped."""
        noted, self._noted = self._noted, None
        if noted is None or noted == (after := self._state()):
            return
        pairs = zip(self._weights, noted, after, strict=True)
        # A call within this one, of a method that FSDP gathers the weights for, has dropped them at its end.
        changed = [name for name, old, new in pairs if old != new and self._weights[name].untyped_storage().nbytes()]
        if not changed:
            return
        raise UsageError(
            f"the forward of {type(module).__name__.removeprefix('FSDP')} changed {', '.join(changed[:3])}, but under "
            "fsdp it has a copy of the weights that is dropped afterwards, so the change would be lost: change the "
            "weights after strategy.step, under torch.no_grad(), where each rank changes its shard, or compute with a "
            "changed copy (weight = renorm(self.weight)), or use backend ddp."
        )


def check_output(module: nn.Module, args: Any, output: Any) -> None:
    """Raise UsageError if an object has a tensor with a graph, and is none of those that torch's pytree opens.

    FSDP would free weights that their backward reads. A hook of each unit that is freed after its forward.
    """
    if isinstance(output, Tensor):
        return
    for part in tree_leaves(output):
        held = getattr(part, "__dict__", {})
        if not isinstance(part, Tensor) and any(isinstance(v, Tensor) and v.requires_grad for v in held.values()):
            raise UsageError(
                f"the forward of {type(module).__name__.removeprefix('FSDP')} returns tensors in a "
                f"{type(part).__name__}, which FSDP does not look into, so that it frees weights before their "
                "backward: return a tuple, a list or a dict, or set fsdp.reshard_after_forward to false."
            )


_FRAMES = 8  # from a hook to functional_call


def refuse_assigned(unit: Any, leaves: dict[Tensor, Tensor], names: dict[Tensor, str]) -> None:
    """Refuse a forward with other weights than the shards of a unit: FSDP would silently gather these.

    Args:
        unit: a module that FSDP gathers as one.
        leaves: the whole parameter for each of its shards.
        names: of the shards.
    """
    # An assignment to the data of a DTensor gives it another storage, and leaves its local tensor as it is.
    places = [
        (names[shard], layer, key, (shard.untyped_storage(), leaves[shard].untyped_storage()))
        for layer in unit.modules()
        for key, shard in layer.named_parameters(recurse=False)
        if shard in leaves
    ]

    def check(module: nn.Module, args: Any) -> None:
        frames = islice(traceback.walk_stack(sys._getframe(1)), _FRAMES)
        # Refused even with the shards themselves: torch.autograd.grad would say that the graph does not use them.
        if any(frame.f_code.co_name == "functional_call" for frame, _ in frames):
            replaced = [name for name, _ in module.named_parameters()]
        else:
            tensors = [(name, getattr(layer, key, None), known) for name, layer, key, known in places]
            replaced = [name for name, p, known in tensors if p is None or p.untyped_storage() not in known]
        if replaced:
            raise UsageError(
                f"{replaced[0]} was replaced, by functional_call for example, or its .data assigned to, but FSDP "
                "gathers the shard as it was: use backend ddp or horovod with functional_call, as in MAML, and change "
                "shards in place (p.data.copy_(values) in place of p.data = values)."
            )

    unit.register_forward_pre_hook(eager(check), prepend=True)  # before fully_shard's hooks replace them


def refuse_tied(module: nn.Module) -> None:
    """Refuse the first forward of a sharded module if weights were tied since: FSDP would silently untie them.

    Args:
        module: the module, just after it was sharded.
    """
    names = {name for name, _ in module.named_parameters()}

    def check(module: nn.Module, args: Any) -> None:
        missing = names - {name for name, _ in module.named_parameters()}
        tied = [name for name, _ in module.named_parameters(remove_duplicate=False) if name in missing]
        if tied:
            raise UsageError(
                f"{', '.join(tied[:3])} was tied to another weight after prepare(), when each has its own shard: FSDP "
                "would untie them in this forward. Tie weights before prepare()."
            )
        hook.remove()

    # Before the hooks of fully_shard, which untie them.
    hook = module.register_forward_pre_hook(eager(check), prepend=True)


def name_layer(module: nn.Module, args: Any, output: Any) -> None:
    """Have torch's error on weights that were not gathered in a forward name the layer, the line and a remedy.

    A hook of the sharded module, called after errors, too. It can't raise another error in place of torch's.
    """
    error = sys.exc_info()[1]
    if not isinstance(error, RuntimeError) or "mixed torch.Tensor and DTensor" not in str(error):
        return
    names = {layer: name for name, layer in module.named_modules()}
    layer, place = module, ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        caller = frame.f_locals.get("self")
        if isinstance(caller, nn.Module) and caller in names:
            layer = caller
        if is_user_code(frame):
            place = f" at {frame.f_code.co_filename}:{line}"
    name = names[layer] or "the model"
    error.args = (
        f"the forward{place} used weights of a layer that it had not called, here in {name}, a "
        f"{type(layer).__name__.removeprefix('FSDP')}. FSDP gathers the weights of a unit when the unit itself is "
        "called: call it, or have another method of it gather them, with torch.distributed.fsdp."
        "register_fsdp_forward_method(layer, name) after prepare(), or leave it out of the units: set fsdp.wrap to the "
        f"classes of others, or to [] for a single unit. (torch: {error})",
    )


def explain_methods(module: nn.Module) -> None:
    """Make methods of Hugging Face's models that need whole weights raise an error with a remedy.

    Args:
        module: the sharded module. Its methods are replaced on the instance.
    """
    for layer in module.modules():
        # Hugging Face calls them on inner models, too.
        for name in ("save_pretrained", "generate"):
            method = getattr(layer, name, None)
            if callable(method):
                setattr(layer, name, functools.partial(_explained, method, saves=name == "save_pretrained"))


def _explained(method: Callable[..., Any], /, *args: Any, saves: bool, **kwargs: Any) -> Any:
    """Call a method of a sharded model, and turn its obscure error into one with a remedy."""
    if saves and kwargs.get("state_dict") is None:
        raise UsageError(
            "save_pretrained() of a sharded model would write this rank's shards. Save a whole copy: copy = strategy."
            "export(model) on all ranks, and then strategy.on_main(lambda: copy.save_pretrained(folder))."
        )
    try:
        return method(*args, **kwargs)
    except RuntimeError as error:
        if "DTensor" not in str(error):
            raise
        raise UsageError(
            "generate() used weights that are sharded. Have them gathered for it: call torch.distributed.fsdp."
            'register_fsdp_forward_method(strategy.unwrap(model), "generate") after prepare(), and then generate() of '
            "strategy.unwrap(model) on all ranks, with synced_gpus=True if they need different numbers of tokens. Or "
            "use strategy.export(model)."
        ) from error
