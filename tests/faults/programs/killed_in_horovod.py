"""``program.py``, whose rank 1 is killed while Horovod initialises it, the first time."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

hvd: Any = import_module("horovod.torch")
PROGRAM = Path(__file__).parent / "program.py"
fault = Path(sys.argv[1]) / "fault"


def killed() -> None:
    fault.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


if os.environ["HOROVOD_RANK"] == "1" and not fault.exists():
    hvd.init = killed
runpy.run_path(str(PROGRAM), run_name="__main__")
