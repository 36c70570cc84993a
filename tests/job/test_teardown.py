"""The end of a successful run: nothing that is left can fail."""

import atexit
import os
import subprocess
import sys
from pathlib import Path

import torch
from ranks import on_ranks

import unitrain


def _gloo_threads() -> list[str]:
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name == "pt_gloo_runloop"]


@on_ranks(fresh=True)
def test_no_thread_of_gloo_outlives_the_strategy() -> None:
    """One that dropped a tensor while Python was shutting down aborted one run in ten on a busy machine."""
    strategy = unitrain.init()
    strategy.all_reduce(torch.ones(3))
    assert _gloo_threads()
    strategy.close()
    assert not _gloo_threads()


@on_ranks()
def test_no_hook_is_left_on_the_parameters() -> None:
    model = torch.nn.Linear(2, 1)
    with unitrain.init() as strategy:
        prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        strategy.step(prepared(torch.ones(1, 2)).sum(), optimizer)
        assert any(p._backward_hooks for p in model.parameters())
    assert not any(p._backward_hooks for p in model.parameters())


@on_ranks(fresh=True)
def test_a_forked_child_that_exits_leaves_the_strategy_to_its_parent() -> None:
    """It would wait for the other ranks on its parent's connections."""
    strategy = unitrain.init()
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()  # as sys.exit() does
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert strategy.all_reduce(torch.ones(1)) == 2
    strategy.close()


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
