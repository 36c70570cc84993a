"""Run recipes several times in one process, since starting a job takes longer than training: ``launched.py CASES``.

CASES is a JSON object: the flags of each case by its name. A case trains into the folder ``CASE``, by the PPO recipe if
its name begins with that, and else by the ResNet recipe. An error ends the process.
"""

import json
import os
import sys
from importlib import import_module

from unitrain.launch.detect import detect
from unitrain.recipes import ppo, resnet

launch = detect(os.environ)
cases: dict[str, str] = json.loads(sys.argv[-1])  # torch.distributed.launch puts --local-rank before it
if launch.launcher == "mpirun" and len(cases) > 1:
    import_module("mpi4py.MPI")  # or MPI ends with the first case, and can't be started again
for case, flags in cases.items():
    sys.argv[1:] = [*flags.split(), f"--output-dir={case}", "--resume=never"]
    (ppo if case.startswith("ppo") else resnet).main()
