"""What a few steps of each rank spend their time on, as a trace for Chrome's tracing page or Perfetto."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import profile, schedule

from unitrain import Strategy

# The first steps allocate memory and lay out buckets; the profiler's own first one is slow.
_SKIPPED, _WARM_UP, _PROFILED = 3, 1, 4


class Profile:
    """A profile of steps 5 to 8 of this run's, on every rank; in one that is not wanted, ``step`` does nothing.

    Args:
        strategy: whose rank the file is named after.
        folder: where ``trace-rankN.json`` goes.
        wanted: whether to profile at all.
    """

    def __init__(self, strategy: Strategy, folder: Path, wanted: bool) -> None:
        self._strategy = strategy
        self._file = folder / f"trace-rank{strategy.rank}.json"
        self._profiler: profile | None = None
        if wanted:
            plan = schedule(wait=_SKIPPED, warmup=_WARM_UP, active=_PROFILED, repeat=1)
            self._profiler = profile(schedule=plan, on_trace_ready=self._write, acc_events=True)
            self._profiler.start()

    def step(self) -> None:
        """Take note that a step (with accumulation, a micro-batch) has ended."""
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        """End a profile that the run was too short for, and say so where there is nothing of it."""
        if self._profiler is not None:
            self._profiler.stop()
        if self._profiler is not None:
            self._profiler = None
            self._strategy.print(f"nothing was profiled: the run took no more than {_SKIPPED + _WARM_UP} steps")

    def _write(self, profiler: profile) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)  # rank 0 has made it, on its own host
        profiler.export_chrome_trace(str(self._file))
        self._profiler = None
        self._strategy.print(f"profiled: {self._file.name} of each rank")
