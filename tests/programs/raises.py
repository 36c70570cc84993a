"""Raise on the last rank, while the others wait for it: ``raises.py FILE BACKEND``. FILE gets the time of it."""

import sys
import time
from pathlib import Path

import unitrain

raised, backend = sys.argv[1:]
strategy = unitrain.init(backend=backend)
strategy.barrier()
if strategy.rank == strategy.world_size - 1:
    Path(raised).write_text(str(time.time()))
    raise RuntimeError("the disk is on fire")
strategy.barrier()
print("came to the end")
