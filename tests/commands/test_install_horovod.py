from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys
import sysconfig
import tarfile
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import torch
from needs import HOROVOD

from unitrain.commands.cli import main
from unitrain.commands.horovod import check as horovod_check
from unitrain.commands.horovod import install
from unitrain.commands.horovod.build import Edit, apply_edits, check_tools, edits_for, fetch, run_logged
from unitrain.commands.horovod.check import check_allreduce, find_horovod
from unitrain.commands.horovod.install import install_horovod, wheel_version
from unitrain.errors import BackendError
from unitrain.launch.local import toolchain
from unitrain.launch.local.toolchain import Mpi, find_mpi
from unitrain.process import cache_folder

OPEN_MPI = Mpi("Open MPI", "4.1.8", Path("/opt/mpi/bin/mpirun"), Path("/opt/mpi/bin/mpicxx"))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder whose programs are found. The cache is empty."""
    monkeypatch.setattr(toolchain, "search_path", lambda: str(tmp_path / "programs"))
    monkeypatch.setenv("UNITRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "programs").mkdir()
    return tmp_path / "programs"


def add(programs: Path, name: str, script: str = "") -> Path:
    (programs / name).write_text(f"#!/bin/sh\n{script}\n")
    (programs / name).chmod(0o755)
    return programs / name


# What is missing is said, all at once and before anything is fetched or built.


def test_without_tools_and_mpi_all_of_them_are_named_with_the_command_that_adds_them(
    programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install-horovod"]) == 1
    out, err = capsys.readouterr()
    assert "no C++ compiler was found (c++, g++, clang++): apt-get install g++" in err
    assert "make was not found: apt-get install make" in err
    assert "CMake was not found: pip install cmake" in err
    assert not list(programs.parent.glob("cache/horovod/*/*.log"))
    assert "gloo controller only" in out
    assert "pip install 'unitrain[mpi]'" in out


def test_only_what_is_missing_is_named(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(programs, "make")
    add(programs, "c++")
    mpirun = add(programs, "mpirun", "echo 'mpirun (Open MPI) 4.1.8'")
    assert main(["install-horovod"]) == 1
    said = capsys.readouterr().err
    assert "CMake was not found" in said
    assert "compiler was" not in said
    assert "make was not found" not in said
    assert f"Open MPI 4.1.8 is installed ({mpirun}), but its mpicxx is missing" in said
    assert "apt-get install libopenmpi-dev" in said
    assert main(["install-horovod", "--without-mpi"]) == 1
    assert "mpicxx" not in capsys.readouterr().err


def test_an_mpirun_that_starts_nothing_is_refused_in_its_own_words(programs: Path) -> None:
    script = "[ $1 = --version ] && echo 'mpirun (Open MPI) 4.1.8' || { echo plm_rsh_agent: ssh not found; exit 1; }"
    mpirun = add(programs, "mpirun", script)
    with pytest.raises(BackendError) as caught:
        check_tools(find_mpi(), None)
    assert f"Open MPI 4.1.8 ({mpirun}) can't start a process: plm_rsh_agent: ssh not found" in str(caught.value)
    assert "apt-get install openssh-client" in str(caught.value)


def test_an_environment_without_pip_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"This environment has no pip.*ensurepip"):
        install_horovod()


def test_this_machine_can_build() -> None:
    check_tools(find_mpi(), None)


def test_gpu_operations_need_a_cuda_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BackendError, match=r"was built without CUDA: install a CUDA build, or"):
        check_tools(OPEN_MPI, "nccl")


def test_a_cuda_toolkit_of_another_major_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    (tmp_path / "bin").mkdir()
    add(tmp_path / "bin", "nvcc", "echo 'Cuda compilation tools, release 9.2, V9.2.148'")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    with pytest.raises(BackendError) as caught:
        check_tools(OPEN_MPI, "nccl")
    said = str(caught.value)
    assert "torch was built with CUDA 13.2, but the toolkit (nvcc, headers) is for CUDA 9.2: set CUDA_HOME" in said


# The change to Horovod's source fits, or it is not built.


def test_edits_are_made_in_order(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text("standard 14\nproject\n")
    apply_edits(tmp_path, [Edit("CMakeLists.txt", "14", "20"), Edit("CMakeLists.txt", "project\n", "project\nrpath\n")])
    assert (tmp_path / "CMakeLists.txt").read_text() == "standard 20\nproject\nrpath\n"


@pytest.mark.parametrize("text", ["set(CMAKE_CXX_STANDARD 17)", "set(CMAKE_CXX_STANDARD 14)\n" * 2, None])
def test_a_source_that_is_not_as_expected_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "CMakeLists.txt").write_text(text)
    with pytest.raises(BackendError) as caught:
        apply_edits(tmp_path, edits_for(None))
    assert "'set(CMAKE_CXX_STANDARD 14)' occurs" in str(caught.value)
    assert "in CMakeLists.txt, and not once" in str(caught.value)


def test_only_a_cpu_build_is_kept_from_looking_for_cuda() -> None:
    changed = {gpu: {edit.file for edit in edits_for(gpu)} for gpu in (None, "nccl")}
    assert "cmake/Modules/FindPytorch.cmake" in changed[None]
    assert "cmake/Modules/FindPytorch.cmake" not in changed["nccl"]


def test_a_source_distribution_with_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "setup.py").write_text("raise SystemExit('this must never run')\n")
    with tarfile.open(tmp_path / "index" / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "setup.py", "horovod-0.28.1/setup.py")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "build").mkdir()
    with pytest.raises(BackendError, match=r"could not be downloaded(.|\n)*DO NOT MATCH THE HASHES") as caught:
        fetch(tmp_path / "build", tmp_path / "log")
    assert "this must never run" not in str(caught.value)


def test_a_failed_command_shows_its_first_error_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "seq 1 50; echo 'a.cc:1:2: error: no such thing'; seq 1001 1100; exit 3"
    with pytest.raises(BackendError) as caught:
        run_logged(["sh", "-c", script], log, "It did not compile")
    message = str(caught.value)
    assert message.startswith("It did not compile:\n    a.cc:1:2: error: no such thing\n    1001\n")
    assert "1100" not in message
    assert message.endswith(f"The complete output is in {log}")
    assert len(log.read_text().splitlines()) == 151


# A wheel is shared by those, and only those, that it fits.


def test_everything_a_wheel_depends_on_changes_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    base = wheel_version(OPEN_MPI, None)
    assert wheel_version(OPEN_MPI, None) == base
    others = [
        wheel_version(None, None),
        wheel_version(dataclasses.replace(OPEN_MPI, version="5.0.11"), None),
        wheel_version(dataclasses.replace(OPEN_MPI, mpirun=Path("/usr/bin/mpirun")), None),
        wheel_version(OPEN_MPI, "nccl"),
    ]
    for where, name, value in [
        (torch, "__version__", "2.13.0+cpu"),
        (sys.implementation, "cache_tag", "cpython-399"),
        (platform, "libc_ver", lambda: ("glibc", "2.28")),
        (install, "edits_for", lambda gpu: ()),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            others.append(wheel_version(OPEN_MPI, None))
    assert len({base, *others}) == len(others) + 1


def test_an_mpi_of_the_environment_is_the_same_in_every_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = set()
    for prefix in ("/home/a/venv", "/home/b/venv"):
        monkeypatch.setattr(sys, "prefix", prefix)
        mpi = dataclasses.replace(OPEN_MPI, mpirun=Path(prefix, "bin", "mpirun"))
        versions.add(wheel_version(mpi, None))
    assert len(versions) == 1


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("UNITRAIN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "unitrain"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "unitrain"
    monkeypatch.setenv("UNITRAIN_CACHE", str(tmp_path / "chosen"))
    assert cache_folder() == tmp_path / "chosen"


# The Horovod that `unitrain install-horovod` put into this environment.


def _unitrain(*arguments: str) -> subprocess.Popen[str]:
    command = [str(Path(sysconfig.get_path("scripts"), "unitrain")), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.all("two interpreters")
@pytest.mark.launcher
@HOROVOD
def test_a_second_install_has_nothing_to_do_even_when_two_run_at_once() -> None:
    with _unitrain("install-horovod") as first, _unitrain("install-horovod") as second:
        said = [process.communicate()[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert all("Nothing to do." in text for text in said), said


@HOROVOD
def test_what_is_installed_says_which_combination_it_is() -> None:
    assert metadata.version("horovod") == wheel_version(find_mpi(), None)


@HOROVOD
def test_the_installed_horovod_tells_what_it_was_built_with() -> None:
    found = find_horovod()
    assert found is not None
    assert (found.version, found.controllers, found.nccl) == ("0.28.1", ("mpi", "gloo"), False)


@pytest.mark.launcher
@pytest.mark.usefixtures("forked")
@HOROVOD
@pytest.mark.parametrize("controller", ["mpi", pytest.param("gloo", marks=pytest.mark.soak)])
def test_two_processes_add_up(controller: str) -> None:
    check_allreduce(controller)


@pytest.mark.launcher
@HOROVOD
def test_a_proof_that_fails_says_what_the_processes_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_check, "_TEST", "import sys; sys.exit('a bad build')")
    with pytest.raises(BackendError, match=r"its mpi controller failed: .*mpirun(.|\n)*a bad build(.|\n)*exit code 1"):
        check_allreduce("mpi")


@pytest.mark.launcher
@HOROVOD
@pytest.mark.soak
@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_proof_that_hangs_is_stopped_with_all_its_processes(
    controller: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    hang = f"import time, os; open(f'{started}-{{os.getpid()}}', 'w').close(); time.sleep(600)"
    monkeypatch.setattr(horovod_check, "_TEST", hang)
    monkeypatch.setattr(horovod_check, "_TEST_SECONDS", 6.0)
    with pytest.raises(BackendError, match=r"timed out after 6 s"):
        check_allreduce(controller)
    pids = [int(path.name.partition("-")[2]) for path in tmp_path.glob("started-*")]
    assert len(pids) == 2
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not alive
