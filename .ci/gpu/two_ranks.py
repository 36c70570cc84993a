"""The second script: two ranks on the one GPU, by gloo, NCCL and Horovod.

python3 .ci/gpu/two_ranks.py [--dry-run]
"""

from __future__ import annotations

from machine import HERE, HOROVOD_BUILD
from steps import Script, Step

LIMIT_OF_A_TEST = "--timeout=90"


def main() -> None:
    """Run the steps."""
    script = Script(__doc__)
    machine = script.machine
    communication = ("auto",) if machine.dry_run else ("gloo", "nccl")
    first = f"a sum by {communication[-1]}"
    needed = dict.fromkeys(communication, "") | {communication[-1]: first}
    contract, others, scripts = "test_contract_on_gpu.py", "test_two_ranks.py", "test_horovod_scripts.py"

    def test(name: str, seconds: float, file: str, backend: str, library: str, only: str, needs: str = "") -> Step:
        """Return a step that runs tests of a file with a backend and a communication library."""
        device = "cpu" if machine.dry_run and backend == "horovod" else machine.device
        variables = {"GPU_WORLD": f"{backend} 2", "GPU_DEVICE": device, "NCCL_NVLS_ENABLE": "0"}
        if backend != "horovod":
            variables[f"UNITRAIN_{backend.upper()}__COMMUNICATION"] = library
        chosen = ["-k", "reductions" if machine.dry_run and not only else only] if only or machine.dry_run else []
        how = ["-n", "2"] if file == contract and not machine.dry_run else ["-s"]
        command = machine.pytest(LIMIT_OF_A_TEST, *how, str(HERE / file), *chosen)
        return Step(name, seconds, command, variables, needs, shown=12 if file == contract else 30)

    # Two ranks of NCCL on one GPU are what NCCL does not promise: all that needs it is left out if this fails.
    script.run(test(first, 75, contract, "ddp", communication[-1], "reductions"))
    contracts = [test(f"contract of ddp by {one}", 160, contract, "ddp", one, "", needed[one]) for one in communication]
    build = [machine.python, *(["-c", "import horovod"] if machine.dry_run else HOROVOD_BUILD)]
    script.run(*contracts, Step("build of Horovod", 235, build))
    script.run(
        test(f"contract of fsdp by {communication[-1]}", 110, contract, "fsdp", communication[-1], "", first),
        test("contract of horovod", 110, contract, "horovod", "", "", "build of Horovod"),
        test("scripts for Horovod", 110, scripts, "horovod", "", "cases", "build of Horovod"),
    )
    script.run(*(test(f"faults by {one}", 80, others, "ddp", one, "not cost", needed[one]) for one in communication))
    script.run(test("costs", 30, others, "ddp", communication[-1], "cost", first))
    script.end()


if __name__ == "__main__":
    main()
