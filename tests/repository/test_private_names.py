"""The private names of torch that the library uses, each with its reason: a release of torch may change any of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from places import ROOT
from torch import nn

MOST = 19  # of 44 in November 2026; it may only fall
REASONS = {
    "_C": "as _set_print_stack_traces_on_fatal_signal",
    "_BatchNorm": "the one base class of BatchNorm's layers, which SyncBatchNorm replaces in place",
    "_StorageInfo": "where a piece is in a file: DCP's metadata file consists of these",
    "_amp_foreach_non_finite_check_and_unscale_": "GradScaler's kernel: one check of all gradients, on the GPU",
    "_backward_hooks": "hooks of the script move to the parameter that takes another's place",
    "_compiled_call_impl": "tells whether module.compile() was called",
    "_metadata": "the versions of layers in a state dict, which load_state_dict reads",
    "_optimizer_step_post_hooks": "hooks of scripts run outside of the exchange of a sharded optimizer's parameters",
    "_optimizer_step_pre_hooks": "as _optimizer_step_post_hooks",
    "_orig_mod": "the module within torch.compile(module)",
    "_post_accumulate_grad_hooks": "as _backward_hooks",
    "_pytree": "the structure of nested state, as torch's own serialisers see it",
    "_rebuild_buckets": "under debug, DDP's own collective comes before the ranks compare calls",
    "_reset_parameters": "initialises nn.MultiheadAttention and nn.Transformer, which have no reset_parameters",
    "_set_print_stack_traces_on_fatal_signal": "C++ stacks of a rank that crashes in the contract",
    "_step_supports_amp_scaling": "GradScaler's convention for optimizers that unscale by themselves",
    "_utils": "torch.utils.data's collate functions and worker information",
    "_version": "tells whether a tensor was changed in place",
}
# torch documents these.
DOCUMENTED = {
    "_dump_snapshot", "_foreach_clamp_max_", "_foreach_clamp_min_", "_foreach_copy_", "_foreach_div_",
    "_foreach_lerp_", "_foreach_mul_", "_foreach_norm", "_foreach_sub", "_python_dispatch", "_record_memory_history",
    "_saved_other", "_saved_reduction", "_saved_target", "_saved_total_weight", "_saved_weight",
}  # fmt: skip
OTHERS = {
    "_ArgumentGroup": "argparse", "_exit": "os",
    "_current_frames": "sys", "_getframe": "sys", "_popen": "multiprocessing", "_run_exitfuncs": "atexit",
    "_register_atexit": "threading", "_asdict": "named tuples", "_fields": "named tuples",
    "_replace": "named tuples",
    "_ex_iterable": "datasets", "_formatting": "datasets",
    "_compute_groups_create_state_ref": "torchmetrics", "_defaults": "torchmetrics", "_groups_checked": "torchmetrics",
    "_reductions": "torchmetrics",
}  # fmt: skip


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name.isidentifier()


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for package in ("unitrain", "backends"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file defines, its attributes among them."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "__slots__" for one in node.targets):
            yield from (str(one.value) for one in ast.walk(node.value) if isinstance(one, ast.Constant))


def used(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield the private names that a file uses of something that is not this project's."""
    of_torch = set(dir(torch.Tensor)) | set(vars(nn.Module()))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr not in own or (node.attr in of_torch and not of_self):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and not node.level and not str(node.module).startswith("unitrain"):
            yield from str(node.module).split(".")
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.Import):
            yield from (part for one in node.names for part in one.name.split("."))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            if isinstance(name, str) and name not in own:
                yield name


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Each private name, and the files that use it."""
    files = list(trees())
    own = {name for _, tree in files for name in defined(tree)}
    found: dict[str, list[str]] = {}
    for path, tree in files:
        for name in filter(is_private, used(tree, own)):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    found["_reset_parameters"] = ["unitrain/training/models/deferred.py"]  # it is in a tuple of names
    return found


def test_every_private_name_has_a_reason(found: dict[str, list[str]]) -> None:
    new = {name: files for name, files in found.items() if name not in {*REASONS, *DOCUMENTED, *OTHERS}}
    assert not new, "use a public name of torch, or say why there is none"


def test_the_list_has_no_name_that_is_not_used(found: dict[str, list[str]]) -> None:
    assert {*REASONS, *DOCUMENTED, *OTHERS} - found.keys() == set()


def test_they_become_no_more() -> None:
    assert len(REASONS) <= MOST
