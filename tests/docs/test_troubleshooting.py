"""What the page on troubleshooting says of breakpoints: which of the two timeouts they trip."""

from __future__ import annotations

import os
import pdb
import sys
import threading
import time

import pytest
from ranks import run_ranks

import unitrain

HEARTBEAT_TIMEOUT_S = 1.0
AT_THE_PROMPT_S = 3.0


def stopped_in_pdb(timeout_s: float) -> float:
    """Stop rank 1 at a prompt that is answered later, and return how long it stood there."""
    strategy = unitrain.init(heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, timeout_s=timeout_s)
    began = time.monotonic()
    if strategy.rank == 1:
        answers, typed = os.pipe()
        threading.Timer(AT_THE_PROMPT_S, os.write, (typed, b"continue\n")).start()
        with open(answers) as stdin:
            pdb.Pdb(stdin=stdin, stdout=sys.stdout).set_trace()
            strategy.barrier()
    else:
        strategy.barrier()
    return time.monotonic() - began


def test_pdb_in_one_rank_sends_heartbeats_and_is_waited_for() -> None:
    assert min(run_ranks(stopped_in_pdb, 60.0)) > 2 * HEARTBEAT_TIMEOUT_S  # the ranks' clocks start moments apart


def test_pdb_is_limited_by_the_timeout_of_collectives() -> None:
    with pytest.raises(unitrain.CommunicationError, match=r"rank 1 .* is in user code"):
        run_ranks(stopped_in_pdb, 1.0)
