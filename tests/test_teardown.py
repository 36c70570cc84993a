"""How a run that did its work ends: with nothing of it left to fail."""

from pathlib import Path

import torch
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
    for before, after in run_ranks(_communicate_and_close):
        assert before > 0
        assert after == []
