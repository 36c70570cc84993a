"""``Profile``: records a few steps with torch's profiler.

The trace has several ranks, with the waits of each, on every backend.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.profiler import profile, record_function, schedule

from unitrain.communication.communicator import Communicator
from unitrain.errors import UsageError, writing
from unitrain.features.profile.timeline import clock, compare_clocks, part_of, write_trace
from unitrain.process import print_stderr
from unitrain.training.feature import Feature
from unitrain.training.hooks import Hooks, StepHook
from unitrain.training.loop.sockets import Sockets
from unitrain.url import is_url

_ANCHOR = "unitrain: clock"


@dataclass(eq=False)
class Profile(Feature):
    """Records a few of the next steps with torch's profiler, on several ranks, in one trace. Adding it is collective.

    Rank 0 writes ``trace-stepN.json.gz``, named by the first step, for https://ui.perfetto.dev. Each rank is a process
    in it, with the clocks of all hosts aligned. What UniTrain does is marked ``unitrain: …``.

    Args:
        folder: a path.
        steps: number of steps to record; with ``local_sgd.steps``, of rounds.
        skip: number of steps before them; the last of these warms the profiler up.
        ranks: the ranks to record; all by default.

    Raises:
        UsageError: when it is added: an argument is out of range, or another profile has not ended.

    Example:
        >>> strategy.add(Profile("runs/a", steps=4, skip=4))
    """

    folder: str | Path
    _: KW_ONLY
    steps: int = 4
    skip: int = 4
    ranks: Sequence[int] | None = None

    def plug_in(self, sockets: Sockets) -> None:
        """Begin. Collective."""
        self._sockets = sockets
        self._recorded = range(sockets.communicator.world_size) if self.ranks is None else self.ranks
        if any(isinstance(hook, Recording) for hook in sockets.hooks):  # torch has one profiler
            raise UsageError("a profile was added while another profile has not ended: add it later.")
        self._check()
        sockets.hooks.add_hook(Recording(sockets.communicator, sockets.hooks, self, self._recorded))

    def _check(self) -> None:
        """Raise UsageError unless a profile can be made as planned, and create its folder. Collective."""
        folder, ranks, world_size = self.folder, self._recorded, self._sockets.communicator.world_size

        def make_folder() -> None:
            with writing(f"profile: {folder}"):
                Path(folder).mkdir(parents=True, exist_ok=True)

        if min(self.steps, self.skip) < 1 or not ranks or not {*ranks} <= {*range(world_size)} or is_url(folder):
            raise UsageError(
                "a profile takes a folder on a disk, a number of steps and of steps to skip, both at least 1, and some "
                f"ranks from 0 to {world_size - 1}, not {folder}, {self.steps}, {self.skip} and {list(ranks)}."
            )
        # Rank 0 writes the trace; all ranks learn of an error.
        self._sockets.communicator.on_main(make_folder)


class Recording(StepHook):
    """Records the planned steps, from when it is a hook until rank 0 has written the trace.

    Args:
        communicator: the communicator of this process.
        hooks: the hooks of the run.
        plan: has been checked.
        ranks: the ranks to record.
    """

    def __init__(self, communicator: Communicator, hooks: Hooks, plan: Profile, ranks: Sequence[int]) -> None:
        self._communicator, self._hooks = communicator, hooks
        self._folder, self._ranks = Path(plan.folder), ranks
        self._begin_at, self._end_at = plan.skip, plan.skip + plan.steps
        self._seen = communicator.collectives.pulse.step
        self._first = 0  # the first step that is recorded
        self._recording, self._call = ExitStack(), ExitStack()  # close ends them
        self._ended = False
        phases = schedule(wait=plan.skip - 1, warmup=1, active=plan.steps, repeat=1)
        profiler = profile(schedule=phases, acc_events=True)
        self._profiler = self._recording.enter_context(profiler)

    def at_boundary(self) -> None:
        """Begin, continue or end, if a step was made. Collective where recording begins and ends."""
        step, made = self._communicator.collectives.pulse.step, self._profiler.step_num + 1
        if step == self._seen:
            return
        self._seen = step
        if made == self._end_at:
            self._end()
            return
        if made == self._begin_at:
            self._begin()
        self._profiler.step()
        with record_function(_ANCHOR):
            self._anchor = clock()

    def _begin(self) -> None:
        collectives, undo = self._communicator.collectives, self._recording.callback
        self._first = self._seen + 1
        self._offsets, self._error, self._zero = compare_clocks(self._communicator)
        collectives.mark_calls(_mark)
        undo(collectives.mark_calls, None)

    def before_call(self, call: str) -> None:
        """Mark a backward or an update."""
        if self._first:
            self._call.enter_context(_mark(call))

    def after_call(self) -> None:
        """Mark its end."""
        self._call.close()

    def at_end(self) -> None:
        """Write the steps that were recorded so far. Collective."""
        self._end()
        self._communicator.barrier()  # no rank ends communication before rank 0 has all parts

    def at_close(self) -> None:
        """Record no more, if the run fails."""
        self._end(failed=True)

    def _end(self, *, failed: bool = False) -> None:
        """End the profile, unless it has ended. Collective, unless this process is failing."""
        if self._ended:
            return
        self._ended = True
        self._hooks.remove_hook(self)
        self._call.close()
        self._recording.close()
        last = self._communicator.collectives.pulse.step
        if 0 < self._first <= last and not failed:
            self._gather(f"steps {self._first} to {last}", self._folder / f"trace-step{self._first}.json.gz")
        elif self._communicator.is_main:
            print_stderr(f"unitrain: nothing was profiled: the run ended after step {last}.")

    def _gather(self, what: str, file: Path) -> None:
        """Write the trace of all ranks on rank 0. Collective."""
        ranks = self._communicator
        offsets, error, _ = compare_clocks(self._communicator)
        error = max(error, self._error) + (offsets - self._offsets).abs().max().item() / 2  # clocks drift
        offset = (offsets + self._offsets)[ranks.rank].item() / 2
        part = self._part(offset) if ranks.rank in self._ranks else b""
        parts = (ranks.broadcast_data(part, src) for src in self._ranks)
        if ranks.is_main:
            try:
                write_trace(file, parts)
                print_stderr(f"unitrain: profiled {what}, with clocks aligned to {error:.0f} µs: {file}")
            except OSError as failure:  # training continues
                print_stderr(f"unitrain: the profile of {what} could not be written to {file}: {failure}")
        for _ in parts:  # on other ranks; and if rank 0 could not write all
            pass

    def _part(self, offset: float) -> bytes:
        """Return this rank's part of the trace."""
        with TemporaryDirectory() as folder:
            exported = Path(folder, "trace.json")
            self._profiler.export_chrome_trace(str(exported))
            events = json.loads(exported.read_bytes())["traceEvents"]
        *_, anchor = (event for event in events if event["name"] == _ANCHOR)
        shift = self._anchor - anchor["ts"] - anchor["dur"] / 2  # torch's times are not this clock's
        return part_of(self._communicator.rank, events, shift - offset - self._zero)


def _mark(phase: str) -> record_function:
    """Return a context manager that marks a phase in the trace."""
    return record_function(f"unitrain: {phase}")
