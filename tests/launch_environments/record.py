"""Records what a launcher tells the processes that it starts, as a fixture of tests/launch/test_launch.py.

    python record.py NAME VERSION -- LAUNCHER AND ITS OPTIONS [record.py]

runs ``LAUNCHER AND ITS OPTIONS python record.py --dump`` and writes NAME.json beside this file: the command, the
launcher's VERSION and the variables of every process, ordered by rank. An argument that is a shell script ending in
``{dump}`` has that command put there. Only variables that a launcher may have set are kept, and nothing that tells
of this machine: its name becomes node0, its folders and addresses vanish.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

PREFIXES = ("GROUP_", "HOROVOD_", "I_MPI_", "LOCAL_", "MASTER_", "MPI_", "OMPI_", "PMI", "PRTE_", "ROLE_", "SLURM_")
NAMES = {"RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "SLURMD_NODENAME", "TORCHELASTIC_RUN_ID"}
NAMES |= {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"}
NOT_THE_LAUNCHERS = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT", "I_MPI_INFO", "SLURM_CONF", "SLURM_JOB_U")
RANKS = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def dump(folder: Path) -> None:
    """Write this process's variables to a file of its own in ``folder``."""
    (folder / f"{os.getpid()}.json").write_text(json.dumps(dict(os.environ)))


def relevant(environ: dict[str, str], inherited: dict[str, str]) -> dict[str, str]:
    """Return the variables that a launcher may have set and that say nothing about this machine."""
    kept = {}
    for name, value in sorted(environ.items()):
        launchers_own = name in NAMES or (name.startswith(PREFIXES) and not name.startswith(NOT_THE_LAUNCHERS))
        if launchers_own and inherited.get(name) != value:
            value = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node0", value)
            if "/" not in value and not re.search(r"tcp|(?!127\.)\b\d+\.\d+\.\d+\.\d+|::", value):
                kept[name] = value
    return kept


def main() -> None:
    name, version, separator, *launcher = sys.argv[1:]
    if separator != "--" or not launcher:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, __file__, "--dump", folder]
        command = [part.replace("{dump}", shlex.join(program)) for part in launcher]
        subprocess.run(command if command != launcher else [*launcher, *program], check=True)
        dumps = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    dumps.sort(key=lambda environ: [int(environ.get(rank, 0)) for rank in RANKS])
    shown = [Path(launcher[0]).name, *launcher[1:]]
    fixture = {
        "command": shlex.join(shown).replace("{dump}", "python SCRIPT"),
        "version": version,
        "environments": [relevant(environ, dict(os.environ)) for environ in dumps],
    }
    Path(__file__).with_name(f"{name}.json").write_text(json.dumps(fixture, indent=1) + "\n")


if __name__ == "__main__":
    dump(Path(sys.argv[2])) if sys.argv[1:2] == ["--dump"] else main()
