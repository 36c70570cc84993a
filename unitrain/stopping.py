"""How a run ends before its time, on all ranks at the same step."""

from __future__ import annotations


class Stopped(SystemExit):
    """The run was stopped on purpose, on every rank at the same step; uncaught, the process ends with ``code``.

    Codes: 3 where a loss or gradient was not finite under ``on_nonfinite="stop"``.
    """
