"""``unitrain.notebook_launch`` in a real kernel: ranks train, return, fail, and are stopped."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from host_commands import blocks_for

kernels = pytest.importorskip("jupyter_client.manager", reason="needs Jupyter's kernel: pip install ipykernel")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::RuntimeWarning:zmq")

DEADLINE_S = 200
CELL = '''
import os, sys, time
from multiprocessing import resource_tracker
import torch
import unitrain

resource_tracker.ensure_running()  # so that no test seems to leave it behind

class NoSuchLabelError(Exception):
    """Defined in the notebook."""

def fails(file):
    print(f"rank {os.environ['RANK']} began")
    if os.environ["RANK"] == "0":
        open(file, "w").close()
        time.sleep(600)
    while not os.path.exists(file):
        time.sleep(0.01)
    raise NoSuchLabelError("label 7")

class Rows(torch.utils.data.Dataset):
    """Defined in the notebook, and read by workers."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((2,), float(index))

def trains(lr):
    with unitrain.init(device="cpu") as strategy:
        model = torch.nn.Linear(2, 1)
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
        read = []
        for rows in strategy.dataloader(Rows(), global_batch_size=4, num_workers=1):
            strategy.step(model(rows).mean(), optimizer)
            read += strategy.gather(rows)[:, 0].tolist()
        strategy.print(f"trained on {strategy.world_size} processes")
        return sorted(read), strategy.export(model)

def stops(folder):
    with unitrain.init(device="cpu") as strategy:
        model = strategy.prepare(torch.nn.Linear(1, 1))
        strategy.checkpoint(folder, model=model)
        strategy.barrier()  # all ranks handle signals now
        strategy.print("trains")
        for _ in strategy.dataloader(range(10_000), global_batch_size=2):
            time.sleep(0.05)
'''


class Kernel:
    """A kernel of Jupyter, as a notebook has one."""

    def __init__(self, folder: Path) -> None:
        # Where it believes to be tested, a kernel does not show what its child processes print.
        environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self._manager, self._client = kernels.start_new_kernel(kernel_name="python3", cwd=str(folder), env=environ)
        self._pid: int = self._manager.provisioner.pid

    def run(self, code: str, meanwhile: Callable[[str], object] = lambda text: None) -> tuple[str, str]:
        """Run a cell, and return what it printed, and the traceback of the error that it ended with."""
        printed, trace = "", ""

        def take(message: Any) -> None:
            nonlocal printed, trace
            content = message["content"]
            if message["msg_type"] == "stream":
                printed += content["text"]
                meanwhile(content["text"])
            elif message["msg_type"] == "error":
                trace = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))

        self._client.execute_interactive(code, output_hook=take, timeout=DEADLINE_S, allow_stdin=False)
        return printed, trace

    def ranks(self) -> list[psutil.Process]:
        """Return the kernel's child processes, except the one that multiprocessing keeps."""
        children = psutil.Process(self._pid).children(recursive=True)
        return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]

    def interrupt(self) -> None:
        """Do what Jupyter does when its user interrupts a kernel; its own method leaves an event loop behind here."""
        os.killpg(self._pid, signal.SIGINT)

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Start a kernel in which ``CELL`` has been run."""
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    assert kernel.run(CELL) == ("", "")
    yield kernel
    kernel.close()


@pytest.mark.launcher
def test_a_function_of_the_notebook_trains_on_two_processes(kernel: Kernel) -> None:
    """torch is used before: a fork of this process might hang."""
    printed, trace = kernel.run(
        "torch.ones(8).sum(); read, model = unitrain.notebook_launch(trains, 0.1, nprocs=2); print(read, type(model))"
    )
    assert trace == ""
    assert "trained on 2 processes\n" in printed
    assert f"{[float(row) for row in range(8)]} <class 'torch.nn.modules.linear.Linear'>\n" in printed
    assert kernel.ranks() == []


@pytest.mark.launcher
def test_the_cell_of_the_page(kernel: Kernel) -> None:
    [block] = blocks_for(Path(__file__))
    assert kernel.run(f"{block.text}\nprint(type(model).__name__)") == ("Linear\n", "")


@pytest.mark.launcher
def test_an_error_is_raised_in_the_cell(kernel: Kernel, tmp_path: Path) -> None:
    launch = f"unitrain.notebook_launch(fails, {str(tmp_path / 'began')!r}, nprocs=2)"
    code = f"try:\n    {launch}\nexcept NoSuchLabelError as error:\n    caught = error\nraise caught"
    printed, trace = kernel.run(code)
    assert "rank 0 began\n" in printed
    assert "rank 1 began\n" in printed
    assert "rank 1: Traceback (most recent call last)" in trace
    assert re.search(r"line 18, in fails\nNoSuchLabelError: label 7", trace), trace  # of the cell
    assert trace.endswith("NoSuchLabelError: label 7")
    assert kernel.ranks() == []


@pytest.mark.soak
@pytest.mark.launcher
def test_interrupting_the_kernel_saves_and_stops(kernel: Kernel, tmp_path: Path) -> None:
    code = f"unitrain.notebook_launch(stops, {str(tmp_path)!r}, nprocs=2)"
    printed, trace = kernel.run(code, lambda text: kernel.interrupt() if "trains" in text else None)
    assert trace.endswith("KeyboardInterrupt: "), trace
    # The kernel's SIGINT reaches the ranks too, and may come before the SIGTERM of their parent.
    assert re.search(r"unitrain: stopped by SIG(INT|TERM) after step 0 and saved in", printed), printed
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000000"]
    assert kernel.ranks() == []
    assert kernel.run("print(6 * 7)") == ("42\n", "")


@pytest.mark.launcher
def test_what_can_not_be_is_refused(kernel: Kernel) -> None:
    for code, said in (
        ("unitrain.notebook_launch(fails, 0, nprocs=0)", "nprocs is 0, but must be at least 1."),
        ("it = (n for n in [])\nunitrain.notebook_launch(lambda: it, nprocs=1)", "copies the function, and what"),
        ("unitrain.notebook_launch(sys.exit, 4, nprocs=1)", "CommunicationError: a rank has called sys.exit(4)"),
        ("unitrain.spawn(fails, 0, nprocs=2)", "typed in, or is a notebook"),
        ("unitrain.notebook_launches", "module 'unitrain' has no attribute 'notebook_launches'"),
    ):
        assert said in kernel.run(code)[1]
