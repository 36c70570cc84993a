"""The first script: what is there, the tests that need a GPU, and what one process can show.

    python3 .ci/gpu/one_process.py [--dry-run]

It begins to build Horovod for the GPU, which goes on when it has ended; the second script waits for it.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from machine import HERE, HOROVOD_BUILD, ROOT
from steps import Script, Step

CONTRACT, PROBES = str(HERE / "test_contract_on_gpu.py"), str(HERE / "test_probes.py")
LIMIT_OF_A_TEST = "--timeout=60"


def main() -> None:
    """Run the steps."""
    script = Script(__doc__)
    machine = script.machine
    if not machine.dry_run:
        with Path(tempfile.gettempdir(), "horovod.log").open("w") as log:
            command = [machine.python, *HOROVOD_BUILD]
            subprocess.Popen(command, env=machine.environment, stdout=log, stderr=log, start_new_session=True)
    inventory = [machine.python, str(HERE / "inventory.py")]
    doctor = [machine.python, "-m", "unitrain.commands.cli", "doctor"]
    script.run(Step("inventory", 60, inventory, shown=30), Step("doctor", 60, doctor, shown=30))
    # Only the files with such tests are read: others import what is not there.
    marked = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    behaviour = [LIMIT_OF_A_TEST, "-k", "not cost", "-s", PROBES]
    only = [] if machine.dry_run else ["-n", "5", "--max-worker-restart", "8"]
    script.run(
        Step("tests marked gpu", 280, machine.pytest("-m", "gpu", "-v", "--timeout=270", *only, *marked), shown=30),
        Step("probes", 120, machine.pytest(*behaviour), shown=30),
    )
    of_contract = ["-k", "reductions or trains_as_one_device[plain]"] if machine.dry_run else []
    script.run(
        *(
            Step(f"contract of {backend}", 90, machine.pytest(LIMIT_OF_A_TEST, CONTRACT, *of_contract), variables)
            for backend in ("single", "data_parallel")
            if not (machine.dry_run and backend == "data_parallel")  # it supports CUDA only
            for variables in [{"GPU_WORLD": f"{backend} 1", "GPU_DEVICE": machine.device}]
        )
    )
    script.run(Step("costs", 80, machine.pytest("-k", "cost", "-s", PROBES), shown=30))
    script.end()


if __name__ == "__main__":
    main()
