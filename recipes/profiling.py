"""A profiler trace of a few steps of each rank, for Chrome's tracing page or Perfetto."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import profile, schedule

from unitrain import Strategy

# The first steps allocate memory and lay out buckets; the profiler's own first one is slow.
_SKIPPED, _WARM_UP, _PROFILED = 3, 1, 4


class Profile:
    """Profiles steps 5 to 8 of this run, on every rank.

    Args:
        strategy: of this run; the file is named after its rank.
        folder: where ``trace-rankN.json`` is written.
        wanted: whether to profile at all; if not, ``step`` does nothing.
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
        """Tell the profiler that a step has ended (with accumulation, a micro-batch)."""
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        """End the profile of a run with fewer steps, and print a message if nothing was profiled."""
        if self._profiler is not None:
            self._profiler.stop()
        if self._profiler is not None:
            self._profiler = None
            self._strategy.print(f"nothing was profiled: the run took no more than {_SKIPPED + _WARM_UP} steps")

    def _write(self, profiler: profile) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)  # rank 0 created it on its own host only
        profiler.export_chrome_trace(str(self._file))
        self._profiler = None
        self._strategy.print(f"profiled: {self._file.name} of each rank")
