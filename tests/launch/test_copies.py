"""Copies of a job that no known launcher has started: all are refused, with one message. Separate runs are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from needs import HOROVOD
from ranks import Launcher, run_ranks

import unitrain
from unitrain.errors import LaunchError

# In interpreters of their own, as a launcher starts them.
INITIALIZES = "import unitrain\nwith unitrain.init() as strategy:\n    print('trains')\n"
LOOKS = """
import time
from unitrain.launch.copies import refuse_copies
time.sleep(0.7)
refuse_copies()
print("trains\\n", end="")
"""
BOTH = "{0} & one=$!; {1}; two=$?; wait $one; echo $? $two"
BELOW_SHELLS = BOTH.format("sh -c 'PY; exit $?'", "sh -c 'PY; exit $?'")


def run(folder: Path, command: str, script: str = LOOKS, **environ: str) -> tuple[list[str], str]:
    """Run a shell's command, where PY stands for Python with the script, and return what it prints, and its errors."""
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        ["sh", "-c", command.replace("PY", f"{sys.executable} train.py")],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return sorted(done.stdout.split()), done.stderr


def test_init_refuses_two_copies_once(tmp_path: Path) -> None:
    out, err = run(tmp_path, BOTH.format("ODD_RANK=1 PY", "ODD_RANK=1 PY").replace("=1", "=0", 1), INITIALIZES)
    assert out == ["2", "2"], err
    [message] = [line for line in err.splitlines() if "unitrain: error:" in line]
    assert "error: 2 processes of this host (pids " in message
    assert "; this one started by 'sh') run `" in message
    assert "no variable of a known launcher is set: each would train the whole job alone" in message
    assert "Numbers that tell this one from the others: ODD_RANK=" in message
    assert "set UNITRAIN_LAUNCHER=python." in message


def test_copies_in_a_scheduler_s_job_are_found_below_different_parents(tmp_path: Path) -> None:
    out, err = run(tmp_path, BELOW_SHELLS, PBS_JOBID="7")
    assert out == ["1", "2"], err  # one raises, and the other leaves it to the first
    assert err.count("LaunchError: 2 processes of this host") == 1


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(BOTH.format("PY --lr 1", "PY --lr 2"), id="other arguments"),
        pytest.param(BOTH.format("UNITRAIN_SEED=1 PY", "UNITRAIN_SEED=2 PY"), id="other settings"),
        pytest.param(BOTH.format("PY", "mkdir a; cp train.py a; cd a; PY"), id="other folder"),
        pytest.param(BOTH.format("LSB_JOBID=7 LSB_JOBINDEX=1 PY", "LSB_JOBID=7 LSB_JOBINDEX=2 PY"), id="job array"),
        pytest.param(BELOW_SHELLS, id="other parents"),
        pytest.param(BELOW_SHELLS.replace("PY", "UNITRAIN_LAUNCHER=python PBS_JOBID=7 PY"), id="meant"),
        pytest.param(BOTH.format(*2 * [f'{sys.executable} -c "$(cat train.py)"']), id="workers"),
    ],
)
def test_separate_runs_are_not_refused(command: str, tmp_path: Path) -> None:
    out, err = run(tmp_path, command)
    assert out == ["0", "0", "trains", "trains"], err


def test_what_a_program_forks_is_not_refused(tmp_path: Path) -> None:
    out, err = run(
        tmp_path, "PY; wait", "import os\nos.fork() and os.fork()\n" + LOOKS + "time.sleep(1)", PBS_JOBID="7"
    )
    assert out == ["trains"] * 3, err


CHILD = "import unitrain\nwith unitrain.init(device='cpu', timeout_s=30) as strategy:\n    print(strategy.world_size)\n"


def start_children(backend: str) -> list[tuple[int, str]]:
    """Start two programs on rank 0, with the backend as a variable: with the rank's variables, and alone."""
    results = []

    def start(**environ: str) -> None:
        run = [sys.executable, "-c", CHILD]
        done = subprocess.run(run, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
        results.append((done.returncode, (done.stdout or done.stderr).strip().rpartition("unitrain: error: ")[2]))

    os.environ["UNITRAIN_BACKEND"] = backend
    with unitrain.init(device="cpu", timeout_s=60) as strategy:
        if strategy.is_main:
            start()
            start(UNITRAIN_LAUNCHER="python")
    assert "_UNITRAIN_RANK" not in os.environ
    return results


@pytest.mark.parametrize(
    ("backend", "launcher"),
    [("ddp", "spawn"), pytest.param("horovod", "mpirun", marks=[HOROVOD, pytest.mark.launcher])],
)
def test_a_program_that_a_rank_starts_does_not_join_its_job(backend: str, launcher: Launcher) -> None:
    refused, alone = run_ranks(start_children, backend, launcher=launcher)[0]
    assert refused[0] == LaunchError.exit_code
    assert refused[1].startswith("this process was started by rank 0 (pid ")
    assert 'env={**os.environ, "UNITRAIN_LAUNCHER": "python"}' in refused[1]
    assert alone == (0, "1")
