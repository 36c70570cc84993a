"""The third script: images a second by benchmarks/gpu.py, which writes its tables into the folder OUT.

python3 .ci/gpu/images_per_second.py [--dry-run]
"""

from __future__ import annotations

from machine import ROOT
from steps import Script, Step


def main() -> None:
    """Run the benchmark, whose own time limit is below that of the step."""
    script = Script(__doc__)
    options = ["--output", script.output, *(["--short"] if script.machine.dry_run else [])]
    command = [script.machine.python, str(ROOT / "benchmarks" / "gpu.py"), *options]
    # Without the simulated device, which torch.compile does not know.
    variables = {"PYTHONPATH": ""} if script.machine.dry_run else {}
    script.run(Step("images a second", 395, command, variables, shown=40))
    script.end()


if __name__ == "__main__":
    main()
