"""``unitrain.notebook_launch``: starts the ranks of a job from a cell of a notebook.

A fork of the notebook's process would need no copies, and is what other libraries use. But it can't use CUDA once the
notebook or a library that it imported has, and it may hang on locks of threads that were not forked.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from unitrain.errors import CommunicationError, UsageError
from unitrain.job.starting.spawn import number_of_ranks, run_processes, spawn_environments

T = TypeVar("T")


def notebook_launch(fn: Callable[..., T], *args: Any, nprocs: int | None = None) -> T:
    """Start ``nprocs`` ranks on this host from a notebook, run ``fn(*args)`` in each, and return rank 0's result.

    ``fn`` calls ``unitrain.init`` itself. What the ranks print appears below the cell. Interrupting the kernel stops
    the ranks; an open checkpoint is saved first.

    ``fn``, its arguments, and all functions, classes and variables of the notebook that it uses are copied into new
    processes, with cloudpickle. So it does not matter what the notebook did before, and nothing in it changes.

    Args:
        fn: the function that every rank runs.
        *args: its arguments, the same on all ranks.
        nprocs: number of ranks. Default: one per visible GPU.

    Raises:
        UsageError: ``nprocs`` is less than 1, or missing without a GPU; or ``fn``, or what it uses, can't be pickled.
        CommunicationError: a rank died, or called ``sys.exit`` (``unitrain.Stopped`` does).
        BaseException: the exception of the first rank that failed, with its rank and traceback as the cause. The
            other ranks are ended first.

    Example:
        >>> losses = unitrain.notebook_launch(train, 0.1, nprocs=2)
    """
    import cloudpickle  # few programs need it

    nprocs = number_of_ranks("notebook_launch", nprocs)
    try:
        work = cloudpickle.dumps((fn, args))
    except Exception as error:  # whatever the objects raise
        raise UsageError(
            "unitrain.notebook_launch copies the function, and what it uses of the notebook, into new processes, and "
            f"failed: {str(error).rstrip('.')}. Create what can't be copied, such as the strategy, inside the function."
        ) from error
    # In a file: a pipe would have one rank after the other import torch before it reads.
    with tempfile.TemporaryDirectory() as folder, spawn_environments(nprocs) as environments:
        path = Path(folder, "work")
        path.write_bytes(work)
        try:
            result, *_ = run_processes(_run_rank, (path,), environments, multiprocessing.get_context("spawn"))
        except SystemExit as error:  # IPython would hide where it came from, and say how to leave the notebook
            raise CommunicationError(f"a rank has called sys.exit({error.code!r}); its output may say why.") from error
    return pickle.loads(result)  # type: ignore[no-any-return]


def _run_rank(path: Path) -> bytes:
    """Run the function on one rank, and return the pickled result if it is rank 0."""
    for stream in (sys.stdout, sys.stderr):  # which the kernel reads, and shows below the cell
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Otherwise the workers of a DataLoader would import the class of its dataset, which stands in a notebook.
    multiprocessing.set_start_method("fork", force=True)
    fn, args = pickle.loads(path.read_bytes())
    import cloudpickle

    if getattr(fn, "__module__", None) == "__main__":
        # Instances of the notebook's classes are pickled by the names of these, here as there: exceptions, say.
        names = {name: value for name, value in getattr(fn, "__globals__", {}).items() if not name.startswith("__")}
        vars(sys.modules["__main__"]).update(names)
    result = fn(*args)
    return cloudpickle.dumps(result) if os.environ["RANK"] == "0" else b""
