"""The end of a successful run: nothing that is left can fail."""

import atexit
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks

import unitrain


def _gloo_threads() -> list[str]:
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name == "pt_gloo_runloop"]


def _communicate_and_close() -> tuple[int, list[str]]:
    strategy = unitrain.init()
    strategy.all_reduce(torch.ones(3))
    before = len(_gloo_threads())
    strategy.close()
    return before, _gloo_threads()


def test_no_thread_of_gloo_outlives_the_strategy() -> None:
    """One that dropped a tensor while Python was shutting down aborted one run in ten on a busy machine."""
    for before, after in run_ranks(_communicate_and_close, fresh=True):
        assert before > 0
        assert after == []


def _descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _exceed(counts: tuple[int, int], first: tuple[int, int]) -> bool:
    return counts[0] > first[0] or counts[1] > first[1]


def _open_and_close_again_and_again() -> list[tuple[int, int]]:
    counts: list[tuple[int, int]] = []
    for _ in range(4):
        with unitrain.init() as strategy:
            model = strategy.prepare(torch.nn.Linear(2, 1))
            strategy.checkpoint(Path(os.environ["TMPDIR"], "checkpoints"), model=model)
        # The kernel lists a thread for a moment after it was joined.
        deadline = time.monotonic() + 5
        while counts and _exceed(_descriptors_and_threads(), counts[0]) and time.monotonic() < deadline:
            time.sleep(0.01)
        counts.append(_descriptors_and_threads())
    return counts


@pytest.mark.parametrize("launcher", ["spawn", pytest.param("horovodrun", marks=HOROVOD)])
def test_no_descriptor_and_no_thread_is_left(launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for first, *later in run_ranks(_open_and_close_again_and_again, launcher=launcher, fresh=True):
        assert not any(_exceed(counts, first) for counts in later), f"at first {first}, then {later}"


def _train_and_close() -> list[int]:
    model = torch.nn.Linear(2, 1)
    with unitrain.init() as strategy:
        prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        strategy.step(prepared(torch.ones(1, 2)).sum(), optimizer)
        hooked = sum(len(p._backward_hooks or ()) for p in model.parameters())
    return [hooked, *(len(p._backward_hooks or ()) for p in model.parameters())]


def test_no_hook_is_left_on_the_parameters() -> None:
    assert run_ranks(_train_and_close) == [[1, 0, 0]] * 2


def _fork_a_child_that_exits() -> tuple[int, list[float]]:
    strategy = unitrain.init()
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()  # as sys.exit() does
        os._exit(0)
    _, status = os.waitpid(child, 0)
    total = strategy.all_reduce(torch.ones(1))
    strategy.close()
    return status, total.tolist()


def test_a_forked_child_that_exits_leaves_the_strategy_to_its_parent() -> None:
    """It would wait for the other ranks on its parent's connections."""
    assert run_ranks(_fork_a_child_that_exits, fresh=True) == [(0, [2.0])] * 2


def test_a_warning_of_the_time_limit_does_not_kill_a_finished_process(tmp_path: Path) -> None:
    """SLURM sends SIGUSR1 some time before the limit, also to a process that is leaving."""
    finished = f"""
import os, signal, torch, unitrain
for _ in range(2):  # the second strategy stops on it again
    with unitrain.init(backend="single") as strategy:
        strategy.checkpoint({str(tmp_path)!r}, model=strategy.prepare(torch.nn.Linear(2, 1)))
        assert strategy._job.stopping._signals._replaced.keys() >= {{signal.SIGUSR1}}
    os.kill(os.getpid(), signal.SIGUSR1)
print("finished")
"""
    done = subprocess.run([sys.executable, "-c", finished], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr
