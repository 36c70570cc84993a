"""Compiles models with ``torch.compile``, in place."""

from __future__ import annotations

from torch import nn

from unitrain.config import StrategyConfig


def compile_in_place(module: nn.Module, config: StrategyConfig) -> None:
    """Compile a module's forward, with its hooks, as the settings say.

    The module and its state dict keys stay the same, unlike with ``torch.compile(module)``, and deep copies of it are
    not compiled. A module that the script has compiled is left as it is. DDP's wrapper comes later: torch then splits
    the graph where DDP's buckets end, so that gradients are averaged while the backward of earlier layers runs.

    Args:
        module: the module, with its hooks.
        config: has ``compile``, true or a mode.
    """
    if is_compiled(module):
        return
    # True stands for torch's default mode.
    mode = config.compile if isinstance(config.compile, str) else None
    module.compile(mode=mode)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled, by ``compile_in_place`` or by the script."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
