"""A profile: a few steps of several ranks in one trace, with what each rank waits for, on every backend."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerAction, profile, record_function

from unitrain.communication.communicator import Communicator
from unitrain.errors import ConfigError, UsageError
from unitrain.metrics.clocks import Reading, clock, compare_clocks, on_main_clock
from unitrain.metrics.traces import part_of, write_trace
from unitrain.process import print_stderr
from unitrain.training.hooks import Hooks, StepHook
from unitrain.url import is_url

_ANCHOR = "unitrain: clock"


class Profile(StepHook):
    """Records ``steps`` steps of a run after ``skip`` others, and is gone when rank 0 has written the trace.

    The last of the others warms torch's profiler up. ``ranks`` are the ranks in the trace.
    """

    def __init__(
        self, communicator: Communicator, hooks: Hooks, folder: str | Path, *,
        steps: int, skip: int, ranks: Sequence[int], memory: bool,
    ) -> None:  # fmt: skip
        if min(steps, skip) < 1 or not ranks or not {*ranks} <= {*range(communicator.world_size)} or is_url(folder):
            raise UsageError(
                "profile() takes a folder on a disk, a number of steps and of steps to skip, both at least 1, and some "
                f"ranks from 0 to {communicator.world_size - 1}, not {folder}, {steps}, {skip} and {list(ranks)}."
            )
        self._communicator, self._hooks, self._folder, self._ranks = communicator, hooks, Path(folder), ranks
        self._steps, self._skip = steps, skip
        self._memory = memory and communicator.device.type == "cuda"
        if memory and not self._memory and communicator.is_main:
            print_stderr(f"unitrain: no memory snapshots: torch records them on CUDA, not on {communicator.device}.")
        communicator.on_main(self._make_folder)
        self._act, self._due = self._warm_up, -1  # what to do next, and after which step
        self._first = 0  # the first step that is recorded
        self.ended: bool = False
        self._phase: record_function | None = None
        self._recording = ExitStack()  # undoes what recording needs
        self._profiler = profile(
            schedule=lambda _: ProfilerAction.RECORD if self._first else ProfilerAction.WARMUP, acc_events=True
        )
        hooks.add_hook(self)

    def at_boundary(self) -> None:
        """Begin, go on or end, if a step was made. Collective where recording begins and ends."""
        step = self._communicator.pulse.step
        if self._due < 0:
            self._due = step + self._skip - 1
        if step >= self._due:
            self._due = step + 1
            self._profiler.step_num = step  # steps have their numbers of the run
            self._act(step)

    def before_call(self, call: str) -> None:
        """Mark a backward or an update."""
        if self._first:
            self._phase = _mark(call)
            self._phase.__enter__()

    def after_call(self) -> None:
        """Mark its end."""
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def close(self, *, failed: bool = False) -> None:
        """End the profile, unless it has ended. Collective, unless this process is failing."""
        if self.ended:
            return
        self.ended = True
        self._hooks.remove_hook(self)
        self.after_call()
        self._recording.close()
        last = self._communicator.pulse.step
        if 0 < self._first <= last and not failed:
            self._gather(f"steps {self._first} to {last}")
        elif self._communicator.is_main:
            print_stderr(f"unitrain: nothing was profiled: the run ended before step {self._due + 1}.")

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder of the profile can't be created: {error}. Pass another one.") from error

    def _warm_up(self, step: int) -> None:
        self._act = self._begin
        self._recording.enter_context(self._profiler)

    def _begin(self, step: int) -> None:
        self._act, self._first = self._go_on, step + 1
        ranks, recording = self._communicator, self._recording
        self._start = compare_clocks(ranks)
        recording.callback(setattr, ranks.pulse, "mark", None)
        ranks.pulse.mark = _mark
        for name in ("all_reduce_async", "all_gather_async", "broadcast_async"):
            call = getattr(ranks, name)
            recording.callback(setattr, ranks, name, call)
            setattr(ranks, name, partial(_marked, name.removesuffix("_async"), call))
        if self._memory:
            self._make_folder()  # on each host
            snapshot = self._folder / f"memory-step{self._first}-rank{ranks.rank}.pickle"
            recording.callback(torch.cuda.memory._record_memory_history, None)
            recording.callback(torch.cuda.memory._dump_snapshot, str(snapshot))
            torch.cuda.memory._record_memory_history()
        self._profiler.step()
        with record_function(_ANCHOR):
            self._anchor = clock()

    def _go_on(self, step: int) -> None:
        if step < self._first + self._steps - 1:
            self._profiler.step()
        else:
            self.close()

    def _gather(self, what: str) -> None:
        """Write the trace of all ranks on rank 0. Collective."""
        ranks, file = self._communicator, self._folder / f"trace-step{self._first}.json.gz"
        with ranks.pulse.within("profile"):
            end = compare_clocks(ranks)
            part = self._part(end) if ranks.rank in self._ranks else b""
            parts = (ranks.broadcast_data(part, src) for src in self._ranks)
            try:
                if ranks.is_main:
                    write_trace(file, parts)
                    error = max(self._start.error, end.error)
                    print_stderr(
                        f"unitrain: profiled {what} in {file}, with clocks aligned to {error:.0f} µs: open it in "
                        "https://ui.perfetto.dev."
                    )
            except OSError as failure:  # training goes on
                print_stderr(f"unitrain: could not write the profile of {what} to {file}: {failure}.")
            for _ in parts:  # of all, on other ranks; of the rest, where writing has failed
                pass

    def _part(self, end: Reading) -> bytes:
        """Return this rank's part of the trace."""
        with TemporaryDirectory() as folder:
            exported = Path(folder, "trace.json")
            self._profiler.export_chrome_trace(str(exported))
            events = json.loads(exported.read_bytes())["traceEvents"]
        [anchor] = [event for event in events if event["name"] == _ANCHOR]
        shift = self._anchor - anchor["ts"] - anchor["dur"] / 2  # torch's times are not this clock's
        return part_of(
            self._communicator.rank, platform.node(), events,
            lambda time: on_main_clock(time + shift, self._start, end),
        )  # fmt: skip


def _mark(phase: str) -> record_function:
    """Return a context manager that marks a phase in the trace."""
    return record_function(f"unitrain: {phase}")


def _marked(verb: str, call: Callable[..., Callable[[], Any]], tensor: Tensor, *how: Any) -> Callable[[], Any]:
    """Start a collective of the core, and mark that, and the wait for its end."""
    name = f"{verb} {how[-1]}"
    with _mark(name):
        wait = call(tensor, *how)

    def finish() -> Any:
        with _mark(f"wait for {name}"):
            return wait()

    return finish
