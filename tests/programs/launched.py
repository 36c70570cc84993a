"""Run recipes several times in one process, since starting a job takes longer than training: ``launched.py CASES``.

CASES is a JSON object: the flags of each case by its name. A case trains into the folder ``CASE``, by the recipe of
its name, or by the ResNet recipe if there is none. An error ends the process.
"""

import json
import os
import sys
from importlib import import_module

from unitrain.launch.detect import detect
from unitrain.recipes import language_model, ppo, resnet

launch = detect(os.environ)
cases: dict[str, str] = json.loads(sys.argv[-1])  # torch.distributed.launch puts --local-rank before it
if launch.launcher == "mpirun" and len(cases) > 1:
    import_module("mpi4py.MPI")  # or MPI ends with the first case, and can't be started again
for case, flags in cases.items():
    sys.argv[1:] = [*flags.split(), f"--output-dir={case}", "--resume=never"]
    {"ppo": ppo, "language_model": language_model}.get(case, resnet).main()
