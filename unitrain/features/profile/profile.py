"""``Profile``: records a few steps with torch's profiler, the same ones on several ranks, with the waits of each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function, schedule

from unitrain.errors import UsageError
from unitrain.process import print_stderr
from unitrain.training.feature import Feature
from unitrain.training.loop.sockets import Sockets


class Profile(Feature):
    """Records a few of the next steps with torch's profiler, on several ranks.

    Each rank writes ``trace-stepN-rankR.json.gz``, named by the first step, for https://ui.perfetto.dev. What UniTrain
    does is marked ``unitrain: …``. If the run ends earlier, the trace is shorter.

    Args:
        folder: a path.
        steps: number of steps to record; with ``local_sgd.steps``, of rounds.
        skip: number of steps before them; the last of these warms the profiler up.
        ranks: the ranks to record; all by default.

    Raises:
        UsageError: a number of steps is less than 1.

    Example:
        >>> strategy.add(Profile("runs/a", steps=4, skip=4))
    """

    def __init__(
        self, folder: str | Path, *, steps: int = 4, skip: int = 4, ranks: Sequence[int] | None = None
    ) -> None:
        if min(steps, skip) < 1:
            raise UsageError(f"a profile needs steps and skip of at least 1, not {steps} and {skip}.")
        self._folder, self._steps, self._skip, self._ranks = Path(folder), steps, skip, ranks

    def plug_in(self, sockets: Sockets) -> None:
        """Begin, if this rank is to be recorded: the hooks of the others cost nothing."""
        self._communicator, self._hooks = sockets.communicator, sockets.hooks
        self._seen = self._communicator.collectives.pulse.step
        self._first = 0  # the first step that is recorded
        self._call = ExitStack()
        if self._ranks is None or self._communicator.rank in self._ranks:
            phases = schedule(wait=self._skip - 1, warmup=1, active=self._steps, repeat=1)
            self._profiler = profile(schedule=phases, on_trace_ready=self._write, acc_events=True)
            self._profiler.start()
            self._communicator.collectives.mark_calls(_mark)
            self._hooks.add_hook(self)

    def before_call(self, call: str) -> None:
        """Mark a backward or an update."""
        self._call.enter_context(_mark(call))

    def after_call(self) -> None:
        """Mark its end."""
        self._call.close()

    def at_boundary(self) -> None:
        """Tell the profiler of a step that was made, and end after the last."""
        step = self._communicator.collectives.pulse.step
        if step != self._seen:
            self._seen = step
            self._profiler.step()
            if self._profiler.step_num == self._skip:
                self._first = step + 1
            if self._profiler.step_num == self._skip + self._steps:
                self.at_close()

    def at_close(self) -> None:
        """End, and write the steps that were recorded so far."""
        self._call.close()
        self._profiler.stop()
        self._communicator.collectives.mark_calls(None)
        self._hooks.remove_hook(self)

    def _write(self, profiler: Any) -> None:
        file = self._folder / f"trace-step{self._first}-rank{self._communicator.rank}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
        except OSError as failure:  # training continues
            print_stderr(f"unitrain: a profile could not be written to {file}: {failure}")


def _mark(phase: str) -> record_function:
    """Return a context manager that marks a phase in the trace."""
    return record_function(f"unitrain: {phase}")
