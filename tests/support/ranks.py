"""The tests' ``run_ranks``: as in ``unitrain.testing``, but in warm worlds, and horovodrun's environments.

horovodrun itself takes seconds to start processes, and only ``backends/horovod/backend.py`` may import Horovod in
``unitrain``.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Literal

import warm

from unitrain.job.starting.spawn import spawn_environments
from unitrain.testing import ranks

# Test modules import them, and with the module each of its ranks would (1 to 3 s).
_PRELOADED_WHERE_USED = ("sklearn.datasets", "torchmetrics", "torchvision")


Launcher = Literal["python", "spawn", "horovodrun", "mpirun"]


def launcher_of(arguments: Iterable[Any]) -> Launcher:
    """Return what sets up ranks for the backend that is among the arguments, or in settings among them."""
    names = [value.get("backend") if isinstance(value, dict) else value for value in arguments]
    return "horovodrun" if any(isinstance(name, str) and name == "horovod" for name in names) else "spawn"


def run_ranks(
    fn: Callable[..., Any],
    *args: Any,
    nprocs: int = 2,
    timeout: float = 60,
    launcher: Launcher | None = None,
    fresh: bool = False,
    world: str = "",
) -> list[Any]:
    """Run ``fn(*args)`` on each of ``nprocs`` ranks; see ``unitrain.testing.ranks.run_ranks``.

    Args:
        fn: a function at the top level of a module.
        *args: its arguments.
        nprocs: number of ranks.
        timeout: time limit in seconds.
        launcher: what starts the ranks, or for "horovodrun", what sets up their environments. By default that is
            "horovodrun" if the arguments name the backend horovod, and else "spawn".
        fresh: whether the ranks must be new processes, because the function measures memory, or leaves what ``warm``
            neither puts back nor sees.
        world: what the function's processes have that others must not have, and keep for the next functions of it.
    """
    launcher = launcher or launcher_of(args)
    # All test modules have been collected by now.
    ranks.preload([name for name in _PRELOADED_WHERE_USED if name in sys.modules])
    make = _FORKED.get(launcher)
    if make is None or fresh:
        return ranks.run_ranks(fn, *args, nprocs=nprocs, timeout=timeout, launcher=make or launcher)
    with make(nprocs) as environments, ranks.logged(environments) as logged:
        return warm.run(f"{launcher} {world}", logged, fn, args, timeout)


def on_ranks(**options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have each of two ranks run a test, so that each of them asserts what the test does.

    Args:
        **options: of ``run_ranks``; a test's arguments ``nprocs`` and ``launcher`` are options, too.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def started(**arguments: Any) -> None:
            if multiprocessing.parent_process() is not None:  # on a rank, which finds this function by its name
                return test(**arguments)
            given: dict[str, Any] = {name: arguments[name] for name in ("nprocs", "launcher") if name in arguments}
            given = {"launcher": launcher_of(arguments.values()), **options, **given}
            run_ranks(partial(started, **arguments), **given)
            return None

        return started

    return decorate


@contextmanager
def horovodrun_environments(nprocs: int) -> Iterator[list[dict[str, str]]]:
    """Set up what ``horovodrun --gloo -np N`` does for its processes, without starting them."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts  # noqa: TID251
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars  # noqa: TID251
    from horovod.runner.http.http_server import RendezvousHTTPServer  # noqa: TID251
    from horovod_rendezvous import Handler

    slots = get_host_assignments(parse_hosts(f"localhost:{nprocs}"), nprocs)
    server = RendezvousHTTPServer(("127.0.0.1", 0), Handler, 0)
    server.init(slots)
    # Horovod's own server takes 0.5 s to stop.
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    job = create_run_env_vars("127.0.0.1", ["lo"], str(server.server_port))
    try:
        yield [{**os.environ, **job, **create_slot_env_vars(slot)} for slot in slots]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_FORKED = {"python": ranks.unlaunched, "spawn": spawn_environments, "horovodrun": horovodrun_environments}
