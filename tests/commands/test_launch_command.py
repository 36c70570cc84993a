"""``unitrain launch``: what it prints for several hosts, and what it starts on this one."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import blocks
from places import ROOT

from unitrain.commands.cli import main
from unitrain.commands.launch import parse_hosts
from unitrain.errors import LaunchError
from unitrain.launch.allocation import Host
from unitrain.launch.local.toolchain import Mpi

HOSTS = ["--hosts", "node0:2,node1:3"]
MPIRUN, RESTARTS = ["--launcher", "mpirun"], ["--max-restarts", "3"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["launch", "--dry-run", *arguments, "train.py", "--", "--name", "a b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in lines:
        if not line.startswith("#"):
            assert shlex.split(line)[-3:] == ["train.py", "--name", "a b"]
    return lines


def test_hosts() -> None:
    assert parse_hosts("node0:2, 10.0.0.1:16,c.example") == [
        Host("node0", 2), Host("10.0.0.1", 16), Host("c.example", 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "a:0"], "--hosts is 'a:0', but must be names of hosts"),
        (["--hosts", "a:2,,b:2"], "must be names of hosts"),
        (["--hosts", "a:2;rm"], "must be names of hosts"),
        (["--hosts", "a:2,a:2"], "names a host twice"),
        (["--processes", "0"], "--processes is 0, but must be at least 1"),
        (HOSTS, "torchrun is started on each host. --dry-run prints the commands"),
        ([*HOSTS, *RESTARTS], "--spare 0 --max-restarts 3 with torchrun on 2 hosts: both must be >= 1"),
        ([*HOSTS, "--spare", "1", *RESTARTS], "--spare 1 --max-restarts 3 with torchrun on 2 hosts"),
        ([*MPIRUN, *HOSTS, "--spare", "2", *RESTARTS], "--spare 2 --max-restarts 3 with mpirun on 2 hosts"),
        ([*MPIRUN, *HOSTS, "--spare", "-1", *RESTARTS], "--spare -1 --max-restarts 3 with mpirun on 2 hosts"),
        ([*MPIRUN, *HOSTS, "--spare", "1"], "--spare 1 --max-restarts 0 with mpirun on 2 hosts"),
        ([*MPIRUN, "--processes", "2", "--spare", "1", *RESTARTS], "with mpirun on 0 hosts"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *arguments, "train.py"]) == 1
    assert message in capsys.readouterr().err


def test_a_launcher_that_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unitrain.launch.local.launchers.find_program", lambda name: None)
    assert main(["launch", "--launcher", "srun", "train.py"]) == 1
    assert "srun is not installed here: it is SLURM's" in capsys.readouterr().err


def test_torchrun_is_started_on_each_host(capsys: pytest.CaptureFixture[str]) -> None:
    where, first, also, second = printed(capsys, *HOSTS)
    assert (where, also) == ("# on node0", "# on node1")
    assert first.startswith("torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node0:29400 ")
    assert second == first.replace("node 2", "node 3")


def test_on_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--processes", "4") == ["torchrun --standalone --nproc-per-node 4 train.py --name 'a b'"]


@pytest.mark.skipif(shutil.which("srun") is None, reason="needs srun: apt-get install slurm-wlm")
def test_srun(capsys: pytest.CaptureFixture[str]) -> None:
    [line] = printed(capsys, "--launcher", "srun", "--hosts", "a:4,b:4")
    assert line.startswith("srun --nodes 2 --nodelist a,b --ntasks-per-node 4 python train.py")
    assert main(["launch", "--dry-run", "--launcher", "srun", *HOSTS, "train.py"]) == 1
    assert "the same number of processes on every host" in capsys.readouterr().err


def test_mpirun_passes_settings_to_other_hosts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNITRAIN_BACKEND", "ddp")
    [line] = printed(capsys, "--launcher", "mpirun", *HOSTS)
    assert line.startswith("mpirun -np 5 -H node0:2,node1:3 --bind-to none -x PATH -x UNITRAIN_BACKEND python train.py")


def test_spare_hosts_are_left_out_at_first(capsys: pytest.CaptureFixture[str]) -> None:
    [line] = printed(capsys, "--launcher", "mpirun", "--hosts", "a:2,b:3,c:4,d:5", "--spare", "2", *RESTARTS)
    assert line.startswith("mpirun -np 5 -H a:2,b:3 ")


LINES = "node1.site\nnode1.site\nnode2.site\nnode2.site\n"
HOSTLIST = "#!/bin/sh\n[ \"$*\" = 'hostlist --expand' ] && echo node1.site node2.site\n"
IN_JOBS = {
    "PBS": ({"PBS_NODEFILE": "file"}, LINES),
    "LSF": ({"LSB_DJOB_HOSTFILE": "file", "LSB_MCPU_HOSTS": "node9 1"}, LINES.replace("\n", " 0,1\n")),
    "LSF without a file": ({"LSB_MCPU_HOSTS": "node1.site 2 node2.site 2 "}, ""),
    "Flux": ({"FLUX_URI": "local:///run/flux/local"}, HOSTLIST),
    "SLURM": ({"SLURM_JOB_NODELIST": "node[1-2].site", "SLURM_TASKS_PER_NODE": "2(x2)"}, ""),
}


@pytest.fixture
def in_job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Stand in a job of a scheduler on two hosts, by the variables and the file that its documentation names."""
    variables, text = IN_JOBS[request.param]
    file = tmp_path / "flux"
    file.write_text(text)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in variables.items():
        monkeypatch.setenv(name, str(file) if value == "file" else value)
    return str(request.param)


@pytest.mark.parametrize("in_job", IN_JOBS, indirect=True)
def test_the_hosts_of_the_job_are_the_default(in_job: str, capsys: pytest.CaptureFixture[str]) -> None:
    each = 1 if in_job == "Flux" else 2
    [line] = printed(capsys, "--launcher", "mpirun")
    assert line.startswith(f"mpirun -np {2 * each} -H node1.site:{each},node2.site:{each} ")
    [line] = printed(capsys, "--launcher", "mpirun", "--processes", "8")
    assert line.startswith("mpirun -np 16 -H node1.site:8,node2.site:8 ")
    assert printed(capsys, "--hosts", "a:2,b:2")[0] == "# on a"
    if in_job != "SLURM":
        assert printed(capsys, "--processes", "8") == [line]


@pytest.mark.parametrize("in_job", ["PBS"], indirect=True)
def test_a_job_on_one_host_or_without_its_file(in_job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(os.environ["PBS_NODEFILE"])
    file.write_text("node1\n" * 4)
    assert printed(capsys) == ["torchrun --standalone --nproc-per-node 4 train.py --name 'a b'"]
    file.unlink()
    assert main(["launch", "--dry-run", "train.py"]) == LaunchError.exit_code
    assert f"PBS_NODEFILE is '{file}', unreadable (No such file or directory)" in capsys.readouterr().err


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "horovodrun"])
def test_the_page_of_a_launcher_shows_what_it_prints(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = "".join(block.text for block in blocks(ROOT / "docs" / "launchers" / f"{launcher}.md"))
    for where in (["--processes", "2"], ["--hosts", "node1:8,node2:8"]):
        assert main(["launch", "--dry-run", "--launcher", launcher, *where, "train.py"]) == 0
        printed = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
        assert printed
        assert set(printed) <= set(page.splitlines())


def test_the_options_of_mpich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes all variables by itself, and knows neither -H nor -x."""
    monkeypatch.setattr("unitrain.launch.local.launchers.find_mpi", lambda: Mpi("MPICH", "4", Path("mpirun"), None))
    monkeypatch.setenv("UNITRAIN_BACKEND", "ddp")
    [line] = printed(capsys, "--launcher", "mpirun", *HOSTS)
    assert line.startswith("mpirun -np 5 -hosts node0:2,node1:3 python train.py")


@pytest.mark.launcher
def test_it_runs_the_command(tmp_path: Path) -> None:
    shows = tmp_path / "shows.py"
    shows.write_text("import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])\n")
    command = [
        sys.executable,
        "-m",
        "unitrain.commands.cli",
        "launch",
        "--processes",
        "2",
        str(shows),
        "--",
        f"{tmp_path}/rank ",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank {rank}").read_text() for rank in (0, 1)] == ["2", "2"]
