"""The private names of other libraries that are used, each with its reason: a release may change any of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from test_lines_of_code import files
from torch import nn

pytestmark = pytest.mark.check

MOST = 28  # it may only fall
REASONS = {
    "_BatchNorm": "the one base class of BatchNorm's layers, which SyncBatchNorm replaces in place",
    "_C": "as _set_print_stack_traces_on_fatal_signal",
    "_InstanceNorm": "as _BatchNorm: its running statistics are averaged",
    "_MEM_FORMAT_ENCODING": "as _StorageInfo, which it is pickled with",
    "_StorageInfo": "where a piece is in a file: DCP's metadata file consists of these",
    "_amp_foreach_non_finite_check_and_unscale_": "GradScaler's kernel: one check of all gradients, on the GPU",
    "_backward_hooks": "hooks of the script move to the parameter that takes another's place",
    "_buffers": "a buffer that is None now may be a tensor on another rank; named_buffers leaves it out",
    "_compiled_call_impl": "tells whether module.compile() was called",
    "_get_iterator": "tells whether a subclass of DataLoader changes batches there, where a loader would not call it",
    "_get_layout": "as _StorageInfo: the function by which the layout of a tensor is pickled",
    "_metadata": "the versions of layers in a state dict, which load_state_dict reads",
    "_non_persistent_buffers_set": "a buffer that replaces another stays persistent or not",
    "_opt_called": "set in a resume; otherwise schedulers warn that the optimizer has never stepped",
    "_optimizer_step_post_hooks": "hooks of scripts run outside of the exchange of a sharded optimizer's parameters",
    "_optimizer_step_pre_hooks": "as _optimizer_step_post_hooks",
    "_orig_mod": "the module within torch.compile(module)",
    "_post_accumulate_grad_hooks": "as _backward_hooks",
    "_pytree": "the structure of nested state, as torch's own serialisers see it",
    "_rebuild_buckets": "under debug, DDP's own collective comes before the ranks compare calls",
    "_remove_autograd_hooks": "of DDP's reducer, when the core's buckets take its place",
    "_remove_worker_pids": "torch must not watch the workers of loaders that the end of the interpreter kills",
    "_reset_parameters": "initialises nn.MultiheadAttention and nn.Transformer, which have no reset_parameters",
    "_set_print_stack_traces_on_fatal_signal": "C++ stacks of a rank that crashes in the contract",
    "_step_supports_amp_scaling": "GradScaler's convention for optimizers that unscale by themselves",
    "_utils": "torch.utils.data's collate functions and worker information",
    "_version": "tells whether a tensor was changed in place",
    "_worker_info": "what get_worker_info returns to datasets that shard themselves; there is no function that sets it",
}
# torch documents these.
DOCUMENTED = {
    "_foreach_copy_", "_foreach_div_", "_foreach_mul_", "_foreach_norm", "_foreach_sub", "_python_dispatch",
    "_saved_dim", "_saved_other", "_saved_reduction", "_saved_self_sym_numel", "_saved_self_sym_sizes", "_saved_target",
    "_saved_total_weight", "_saved_weight",
}  # fmt: skip
OTHERS = {
    "_UNITRAIN_RANK": "the variable that marks a rank", "_exit": "os",
    "_current_frames": "sys", "_getframe": "sys", "_popen": "multiprocessing", "_run_exitfuncs": "atexit",
    "_register_atexit": "threading", "_asdict": "named tuples", "_fields": "named tuples",
    "_replace": "named tuples",
    "_ex_iterable": "datasets", "_formatting": "datasets",
}  # fmt: skip
TORCHMETRICS = {
    "_computed": "the cached value of a metric, which states that are put back make invalid",
    "_defaults": "the states after a reset: a rank whose states equal them has seen no sample",
    "_reductions": "names the states, and the function that reduces each over the ranks",
    "_sync_dist": "what sync() calls; dist_sync_fn gets one state at a time, without the ranks that have no samples",
    "_update_count": "set when states are put back or loaded; update_count can only be read",
    "_wrap_update": "a copy of a metric wraps its update anew; update as an attribute would update the original",
}
LISTED = {*REASONS, *DOCUMENTED, *OTHERS, *TORCHMETRICS}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name.isidentifier()


def of_itself(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file defines, with the attributes that objects give themselves."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_itself(node):
            yield node.attr
        elif isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__slots__" for target in node.targets):
            yield from (str(slot.value) for slot in ast.walk(node.value) if isinstance(slot, ast.Constant))


def used(tree: ast.Module, of_project: set[str]) -> Iterator[str]:
    """Yield the private names that a file uses of other libraries: attributes, imports, and names in strings."""
    of_torch = set(dir(torch.Tensor)) | set(vars(nn.Module()))
    texts = {id(part) for node in ast.walk(tree) for part in _no_names(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr not in of_project or (node.attr in of_torch and not of_itself(node)):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and not node.level and not str(node.module).startswith("unitrain"):
            yield from str(node.module).split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield from {node.value} - of_project  # as in getattr(module, "_name")


def _no_names(node: ast.AST) -> list[ast.AST]:
    """Return the strings of a node that are not the name of an attribute: parts of a text, and ``dest`` of argparse."""
    if isinstance(node, ast.JoinedStr):
        return [*node.values]
    return [node.value] if isinstance(node, ast.keyword) and node.arg == "dest" else []


def uses(trees: Iterable[tuple[Path, ast.Module]]) -> dict[str, list[str]]:
    """Return each private name of another library, and the files that use it."""
    trees = list(trees)
    of_project = {name for _, tree in trees for name in defined(tree)}
    by_name: dict[str, list[str]] = {}
    for path, tree in trees:
        for name in filter(is_private, used(tree, of_project)):
            by_name.setdefault(name, []).append(str(path))
    return by_name


def test_every_private_name_has_a_reason() -> None:
    found = uses((path, ast.parse(source)) for path, source in files())
    new = {name: paths for name, paths in found.items() if name not in LISTED}
    assert not new, "use a public name, or say why there is none"
    assert LISTED - found.keys() == set(), "remove what is no longer used"
    assert len(REASONS) <= MOST
