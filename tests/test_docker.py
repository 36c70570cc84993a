from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCKERFILES = sorted(ROOT.glob("docker/*.Dockerfile"))
COMPOSE_FILES = sorted(ROOT.glob("docker/compose.*.yaml"))


def _instructions(dockerfile: Path) -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    words = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, rest in words]


def _services(path: Path) -> dict[str, Any]:
    services = yaml.safe_load(path.read_text())["services"]
    assert isinstance(services, dict)
    return services


def test_there_is_an_image_for_cpus_and_one_for_gpus() -> None:
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]
    assert [path.name for path in COMPOSE_FILES] == ["compose.cpu.yaml", "compose.gpu.yaml"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_the_linter_has_nothing_to_say(dockerfile: Path) -> None:
    hadolint = Path(sysconfig.get_path("scripts"), "hadolint")
    done = subprocess.run([hadolint, "--no-color", dockerfile], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_bases_are_pinned_and_nothing_runs_as_root(dockerfile: Path) -> None:
    instructions = _instructions(dockerfile)
    bases = [rest.split()[0] for name, rest in instructions if name == "FROM"]
    assert bases
    assert all(re.fullmatch(r"[\w/]+:\d+\.\d+[\w.-]*", base) for base in bases)
    users = [rest for name, rest in instructions if name == "USER"]
    assert users
    assert users[-1] not in ("root", "0")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_horovod_comes_from_our_own_command(dockerfile: Path) -> None:
    runs = [rest for name, rest in _instructions(dockerfile) if name == "RUN"]
    assert [run for run in runs if "unitrain install-horovod" in run]
    assert ("--gpu nccl" in " ".join(runs)) == (dockerfile.name == "cuda.Dockerfile")


def test_both_images_have_the_same_torch() -> None:
    pins = [sorted(re.findall(r"ARG TORCH\w*_VERSION=\S+", path.read_text())) for path in DOCKERFILES]
    assert pins[0] == pins[1]
    assert len(pins[0]) == 2


def test_what_the_installation_needs_travels_to_the_builder() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"pyproject.toml", "README.md", "LICENSE", "unitrain", "backends", "recipes"} == allowed
    assert all((ROOT / name).exists() for name in allowed)


@pytest.mark.parametrize("compose", COMPOSE_FILES, ids=lambda path: path.name)
def test_services_build_a_file_that_is_there(compose: Path) -> None:
    for name, service in _services(compose).items():
        context = (compose.parent / service["build"]["context"]).resolve()
        assert context == ROOT, name
        assert (context / service["build"]["dockerfile"]) in DOCKERFILES, name


@pytest.mark.parametrize("compose", COMPOSE_FILES, ids=lambda path: path.name)
def test_services_run_a_recipe_that_is_there(compose: Path) -> None:
    for name, service in _services(compose).items():
        words = re.findall(r"recipes/\w+\.py", str(service["command"]))
        assert words, name
        assert all((ROOT / word).is_file() for word in words), name


def test_the_two_nodes_meet_at_one_of_them() -> None:
    services = _services(ROOT / "docker" / "compose.cpu.yaml")
    for service in services.values():
        (endpoint,) = [word for word in service["command"] if word.startswith("--rdzv-endpoint=")]
        assert endpoint.partition("=")[2].partition(":")[0] in services
        assert f"--nnodes={len(services)}" in service["command"]


def test_the_gpu_services_ask_for_every_gpu() -> None:
    for service in _services(ROOT / "docker" / "compose.gpu.yaml").values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", "all", ["gpu"])
