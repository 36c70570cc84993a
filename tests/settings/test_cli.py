from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from unitrain.commands.cli import main


def test_the_installed_command_knows_its_version() -> None:
    command = Path(sysconfig.get_path("scripts"), "unitrain")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"unitrain {version('unitrain')}\n"


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("conform", "doctor", "install-horovod", "run", "verify"))


def test_the_help_of_a_subcommand_has_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["install-horovod", "--help"])
    assert "auto does so if torch finds a GPU (default: auto)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "COMMAND"),
        (["instal-horovod"], "'instal-horovod'"),
        (["install-horovod", "--gpu", "rccl"], "'rccl'"),
        (["doctor", "--yaml"], "--yaml"),
        (
            ["checkpoint", "merge", "runs", "--output", "gs://bucket/model.pt"],
            "--output: gs://bucket/model.pt is a URL: pass the path",
        ),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_names_what_is_wrong(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_an_error_is_one_message_and_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--backend", "dpd"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("unitrain verify: backend 'dpd' is not")
    assert said.err.count("\n") == 1


@pytest.mark.all("an interpreter")
def test_a_termination_ends_what_was_started_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'started'}; exec /bin/sleep 600\n")
    (tmp_path / "mpirun").chmod(0o755)
    doctor = f"""
import sys
from unitrain.commands.cli import main
from unitrain.launch.local import toolchain
toolchain.search_path = lambda: {str(tmp_path)!r}
sys.exit(main(["doctor"]))
"""
    with subprocess.Popen([sys.executable, "-c", doctor], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        mpirun = psutil.Process(int((tmp_path / "started").read_text()))  # waits until mpirun writes it
        process.terminate()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not mpirun.is_running()
