"""Which signals stop a run."""

from __future__ import annotations

import os
import signal

from unitrain.job.watch.stopping import StopSignals


def test_handlers_of_the_script_are_left_in_place() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    got: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    requested: list[int] = []
    signals = StopSignals(requested.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    signals.close()
    signal.signal(signal.SIGUSR1, before)
    assert (got, requested) == ([signal.SIGUSR1], [])
