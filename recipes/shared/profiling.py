"""``Profile``: a profiler trace of a few steps of each rank, for Perfetto or ``chrome://tracing``."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import profile, schedule

from unitrain import Strategy

# The first steps allocate memory and build buckets, and the first step with the profiler is slow.
_SKIPPED, _WARM_UP, _PROFILED = 3, 1, 4


class Profile:
    """Profiles steps 5 to 8 of this run, on every rank.

    Args:
        strategy: the strategy of this run; the file is named after its rank.
        folder: folder of ``trace-rankN.json``.
        wanted: whether to profile; otherwise ``step`` does nothing.
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
        """Notify the profiler of the end of a step (with accumulation, of a micro-batch)."""
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        """Stop profiling if the run had fewer steps, and print a message if nothing was profiled."""
        if self._profiler is not None:
            self._profiler.stop()
        if self._profiler is not None:
            self._profiler = None
            self._strategy.print(
                f"nothing was profiled: profiling starts after step {_SKIPPED + _WARM_UP}, and the run had no more."
            )

    def _write(self, profiler: profile) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)  # rank 0 created it on its own host only
        profiler.export_chrome_trace(str(self._file))
        self._profiler = None
        self._strategy.print(f"wrote a profiler trace of each rank: {self._file}")
