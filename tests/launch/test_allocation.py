"""The hosts of a scheduler's job, by the variables, the file and the command that its documentation names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from unitrain.errors import LaunchError
from unitrain.launch.allocation import allocated_hosts

LINES = "node1.site\nnode1.site\nnode2.site\nnode2.site\n"
HOSTLIST = "#!/bin/sh\n[ \"$*\" = 'hostlist --expand' ] && echo node1.site node2.site\n"
NEEDS_SLURM = pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs SLURM: apt-get install slurm-wlm")


@pytest.mark.parametrize(
    ("variables", "text", "slots"),
    [
        pytest.param({"PBS_NODEFILE": "file"}, LINES, 2, id="PBS"),
        pytest.param(
            {"LSB_DJOB_HOSTFILE": "file", "LSB_MCPU_HOSTS": "node9 1"}, LINES.replace("\n", " 0,1\n"), 2, id="LSF"
        ),
        pytest.param({"LSB_MCPU_HOSTS": "node1.site 2 node2.site 2 "}, "", 2, id="LSF without a file"),
        pytest.param({"FLUX_URI": "local:///run/flux/local"}, HOSTLIST, 1, id="Flux"),
        pytest.param({"SLURM_JOB_NODELIST": "node[1-2].site"}, "", 1, id="SLURM", marks=NEEDS_SLURM),
        pytest.param({}, "", 0, id="no job"),
    ],
)
def test_hosts(
    variables: dict[str, str], text: str, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "flux"
    file.write_text(text)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = allocated_hosts({name: str(file) if value == "file" else value for name, value in variables.items()})
    assert hosts == ({"node1.site": slots, "node2.site": slots} if slots else {})


def test_a_missing_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    with pytest.raises(LaunchError) as raised:
        allocated_hosts({"PBS_NODEFILE": str(file)})
    assert f"PBS_NODEFILE is '{file}', which can't be read (No such file or directory)" in str(raised.value)
