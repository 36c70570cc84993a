"""The step stands on one page: how long that page is, how many parts it has, and how many files a step passes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from inspect import getsource
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from ranks import run_ranks
from test_lines_of_code import files, lines_of
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import unitrain
from unitrain.training.loop import step
from unitrain.training.loop.step import TrainingStep
from unitrain.training.windows.window import Window

# Each bound is a promise of docs/about/architecture.md.
MOST_CODE = 220
MOST_LINES_OF_THE_ORDER = 45
MOST_ATTRIBUTES = 15
MOST_SLOTS = 13
MOST_FILES = 17


def test_the_page_of_the_step_is_short() -> None:
    assert lines_of(getsource(step)).code <= MOST_CODE


def test_the_order_of_a_step_is_in_two_adjacent_functions() -> None:
    [tree] = ast.parse(getsource(TrainingStep)).body
    assert isinstance(tree, ast.ClassDef)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = [function.name for function in functions]
    first = names.index("_backward")
    assert names[first + 1] == "_update"
    lines = sum((node.end_lineno or 0) - node.lineno + 1 for node in functions[first : first + 2])
    assert lines <= MOST_LINES_OF_THE_ORDER


def set_attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the attributes that are assigned or deleted, as the expression for their object and their name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield ast.unparse(node.value), node.attr


def test_a_step_has_few_parts() -> None:
    attributes = {name for place, name in set_attributes(ast.parse(getsource(TrainingStep))) if place == "self"}
    assert len(attributes) <= MOST_ATTRIBUTES, sorted(attributes)


def test_only_the_methods_of_a_window_set_its_slots() -> None:
    slots = set(Window.__slots__)
    assert len(slots) <= MOST_SLOTS, sorted(slots)
    others = {"self", "self._pulse", "progress", "_watch"}  # of other classes, with attributes of these names
    set_outside = [
        f"{path}: {place}.{name}"
        for path, source in files()
        for place, name in set_attributes(ast.parse(source))
        if name in slots and place not in others
    ]
    assert set_outside == []


def files_entered(with_loader: bool) -> dict[str, list[str]]:
    """Train on a rank. Return the files of UniTrain that one step enters, and the functions in each, in order."""
    package = Path(unitrain.__file__).parent
    homes = {package: "unitrain", (package.parent / "backends"): "backends"}
    entered: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            entered.setdefault(frame.f_code)

    with unitrain.init(backend="ddp", device="cpu", clip_norm=1.0, timeout_s=30) as strategy:
        module = nn.Linear(4, 1)
        model, optimizer = strategy.prepare(module, SGD(module.parameters(), lr=0.1))
        samples = torch.arange(256.0).view(64, 4) / 256
        loader = strategy.dataloader(TensorDataset(samples), global_batch_size=8)
        batches = iter(loader) if with_loader else iter([(part,) for part in samples[strategy.rank :: 2].split(4)])  # type: ignore[no-untyped-call]
        for number, (batch,) in enumerate(batches):
            loss = model(batch).pow(2).mean()
            if number == 5:  # the first steps register, compare and check
                sys.setprofile(note)
            try:
                strategy.step(loss, optimizer)
            finally:
                sys.setprofile(None)
    functions: dict[str, list[str]] = {}
    for code in entered:
        for home, name in homes.items():
            if Path(code.co_filename).is_relative_to(home):
                functions.setdefault(f"{name}/{Path(code.co_filename).relative_to(home)}", []).append(code.co_name)
    return functions


def both_loops() -> list[dict[str, list[str]]]:
    return [files_entered(with_loader=True), files_entered(with_loader=False)]


def test_a_step_on_two_ranks_enters_few_files() -> None:
    for loops in run_ranks(both_loops):
        for entered in loops:
            assert "unitrain/training/loop/step.py" in entered
            listed = "\n".join(f"{file}: {', '.join(functions)}" for file, functions in entered.items())
            assert len(entered) <= MOST_FILES, f"a step enters {len(entered)} files:\n{listed}"
