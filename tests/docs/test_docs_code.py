"""Every code block of the documentation runs: in a section with each other's names, on a page with each other's files.

What can't run here says why, in a comment above it (``page_blocks``), and is listed with the tests that were skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from page_blocks import PAGES, Block, blocks
from places import ROOT
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import unitrain

BLOCKS = {page: found for page in PAGES if (found := list(blocks(page)))}
NOT_RUN = [block for page in PAGES for block in BLOCKS.get(page, ()) if block.not_run]


def names(*, makes_strategy: bool, prepares: bool, schedules: bool) -> dict[str, Any]:
    """Return what a section takes for granted: a model, an optimizer, data and, if it does not make one, a strategy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_set, test_set = (TensorDataset(torch.randn(n, 3, 2, 2), torch.randint(10, (n,))) for n in (40, 10))
    given: dict[str, Any] = {}
    if not makes_strategy:
        given["strategy"] = strategy = unitrain.init()
        if not prepares:
            strategy.prepare(model, optimizer)
        given["train"] = strategy.dataloader(train_set, global_batch_size=8)
        given["test"] = given["val"] = strategy.dataloader(test_set, batch_size=4)
    if schedules:  # else it would be missing in checkpoints
        given["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    modules = {"torch": torch, "nn": nn, "DataLoader": DataLoader, "unitrain": unitrain}
    objects = {"model": model, "criterion": nn.CrossEntropyLoss(), "optimizer": optimizer}
    return {"__name__": "page", **modules, **objects, "train_set": train_set, "test_set": test_set, **given}


_LAUNCHER = "make test starts other pages' launchers, and this one for test_launchers.py"
STARTS = {
    "launchers/horovodrun.md": _LAUNCHER,
    "launchers/mpirun.md": _LAUNCHER,
    "launchers/spawn.md": "two interpreters, which test_spawn.py starts, too",
    "troubleshooting.md": "two interpreters, which test_spawn.py starts, too",
}


def run_python(block: Block, names: dict[str, Any]) -> None:
    # In a file, where pydantic finds the docstrings of settings.
    file = Path(re.sub(r"\W", "_", block.place) + ".py")
    file.write_text(block.text)
    exec(compile(block.text, str(file), "exec", dont_inherit=True), names)


def run_shell(block: Block) -> str:
    lines = block.text.splitlines()
    if block.language == "console" and any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    text = "\n".join(lines)
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    command = ["bash", "-euc", text]
    ran = subprocess.run(command, env=environ, input=block.answer, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, f"{block.place}\n{text}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def without_numbers(text: str) -> list[str]:
    return re.sub(r"\d+(\.\d+)?", "0", text).splitlines()


def run(block: Block, names: dict[str, Any], printed: str) -> str:
    """Run a block, and return what it prints if it is a shell's."""
    if block.title:
        if block.language == "python":
            compile(block.text, block.place, "exec", dont_inherit=True)
        Path(block.title).write_text(block.text)
    elif block.language == "python":
        run_python(block, names)
    elif block.language in ("bash", "sh", "console"):
        return run_shell(block)
    elif block.language == "yaml":
        yaml.safe_load(block.text)
    elif block.language == "text":
        lines = {line[line.find(":") + 1 :] if line.startswith("[") else line for line in without_numbers(printed)}
        assert lines.issuperset(without_numbers(block.text)), f"{block.place}: was printed:\n{printed}"
    else:
        raise AssertionError(f"{block.place}: a block of {block.language or 'no language'} can't be run: say why")
    return printed


def run_page(page: Path, folder: Path, *, python_only: bool = False, without: str = "") -> None:
    """Run a page's blocks in a folder, but for sections that use one library."""
    os.chdir(folder)
    printed = ""
    for _, section in groupby(BLOCKS[page], lambda block: block.section):
        run_here = [block for block in section if not (block.not_run or block.copy)]
        if without and any(f"from {without} import" in block.text for block in run_here):
            continue
        python = [block for block in run_here if block.language == "python" and not block.title]
        makes_strategy = any("unitrain.init(" in block.text for block in python)
        prepares = any(".prepare(model" in block.text for block in python)
        schedules = any("scheduler" in block.text for block in python)
        given = {"makes_strategy": makes_strategy, "prepares": prepares, "schedules": schedules}
        shared = names(**given) if python else {}
        for block in python if python_only else run_here:
            printed = run(block, shared, printed)
        if "strategy" in shared:
            shared["strategy"].close()


def in_tier(page: Path) -> Any:
    """Return the parameter of a page."""
    place = str(page.relative_to(ROOT)).removeprefix("docs/")
    return pytest.param(page, marks=pytest.mark.all(STARTS[place])) if place in STARTS else page


# On fewer cores than the pages have.
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("page", [in_tier(page) for page in BLOCKS], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # back at the end
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread stays for good
    run_page(page, tmp_path)


def moving(folders: list[Path]) -> None:
    page = ROOT / "docs" / "migrating" / "moving.md"
    # test_trainer.py runs the section with transformers on two ranks.
    run_page(page, folders[int(os.environ["RANK"])], python_only=True, without="transformers")


def test_what_is_said_of_moving_holds_on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    run_ranks(moving, [tmp_path_factory.mktemp("rank") for _ in range(2)])


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: block.place)
def test_what_is_not_run_here(block: Block) -> None:
    pytest.skip(f"a block of the documentation: {block.not_run}")
