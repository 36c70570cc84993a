"""What the benchmarks share: rounds that take turns, processes under launchers, workloads, and reports."""
