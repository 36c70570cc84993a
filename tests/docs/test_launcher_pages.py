"""The commands on the pages of launchers: a test runs each of them as it stands there, on as many hosts as it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from host_commands import host_commands
from page_blocks import PAGES, Block, blocks
from places import ROOT
from slurm import Slurm
from trained import TRAINS, Weights, assert_trained, expected

from unitrain.launch.local import launchers
from unitrain.launch.local.launchers import launch_command
from unitrain.launch.local.toolchain import Mpi

__all__ = ["expected"]  # the fixture

FOLDER = ROOT / "docs" / "launchers"
BLOCKS = {page.stem: list(blocks(page)) for page in PAGES if page.parent == FOLDER}
ELSEWHERE = [one for page, found in BLOCKS.items() for one in found if one.not_run and page != "slurm"]
ROWS = [line for line in (FOLDER / "index.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
TABLE = re.findall(r"`(\w+ [^`]*train\.py)`", "\n".join(ROWS))


@pytest.mark.parametrize("block", ELSEWHERE, ids=lambda block: block.place)
def test_what_is_not_run_as_a_part_of_its_page_is_run_by_a_test_that_reads_it(block: Block) -> None:
    [test] = (ROOT / "tests").rglob(block.not_run.split()[0])
    assert "blocks_for(Path(__file__))" in test.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [one for one in TABLE if one.split()[0] not in ("python", "srun")])
def test_the_table_shows_commands_of_the_pages(command: str) -> None:
    shown = {line for block in BLOCKS[command.split()[0]] for line in block.text.splitlines()}
    assert with_any_numbers(command) in set(map(with_any_numbers, shown))


def with_any_numbers(command: str) -> str:
    return re.sub(r"\b\d+\b", "N", command)


@pytest.mark.launcher
@pytest.mark.soak
@pytest.mark.xdist_group("slurm")
@pytest.mark.parametrize("command", [one for one in TABLE if one.startswith("srun")])
def test_srun(command: str, slurm: Slurm, expected: Weights, tmp_path: Path) -> None:
    [(_, words)] = host_commands(command, ["this"], [str(TRAINS), str(tmp_path)])
    environ = {**slurm.env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SLURM_OVERSUBSCRIBE": "1"}
    subprocess.run(words, env=environ, check=True, timeout=120)
    assert_trained(tmp_path, expected, world_size=4 if "-N 2" in command else 2)


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "horovodrun"])
def test_the_page_of_a_launcher_shows_the_command_of_verify(launcher: str) -> None:
    command = " ".join(launch_command(launcher, 2, ["train.py"])).replace(sys.executable, "python")
    command = command.replace("python -m torch.distributed.run", "torchrun")  # which is a script that runs it
    shown = {line for block in BLOCKS[launcher] for line in block.text.splitlines()}
    assert command in shown


def test_mpich_has_no_option_to_bind_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "find_mpi", lambda: Mpi("MPICH", "4", Path("mpirun"), None))
    assert launch_command("mpirun", 2, ["train.py"]) == ["mpirun", "-np", "2", sys.executable, "train.py"]
