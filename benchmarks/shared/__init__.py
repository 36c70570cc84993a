"""Shared parts of the benchmarks: alternating rounds, processes under launchers, workloads, and reports."""
