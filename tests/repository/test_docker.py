from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from host_commands import blocks_for
from places import ROOT

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


@pytest.mark.check
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
    packages = {"unitrain", "backends", "recipes"}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "docker/ssh", *packages} == allowed
    assert all((ROOT / name).exists() for name in allowed)


@pytest.mark.parametrize("compose", COMPOSE_FILES, ids=lambda path: path.name)
def test_services_build_a_file_and_run_a_recipe_that_are_there(compose: Path) -> None:
    for name, service in _services(compose).items():
        context = (compose.parent / service["build"]["context"]).resolve()
        assert context == ROOT, name
        assert (context / service["build"]["dockerfile"]) in DOCKERFILES, name

        words = re.findall(r"recipes/\w+\.py", str(service["command"]))
        assert words or re.search("sshd|ssh-keygen", str(service["command"])), name
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


@pytest.mark.parametrize("compose", COMPOSE_FILES, ids=lambda path: path.name)
@pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="needs docker-compose: apt-get install docker-compose"
)
def test_compose_reads_its_files(compose: Path) -> None:
    read = subprocess.run(
        ["docker-compose", "--file", compose, "config", "--quiet"], capture_output=True, text=True, check=False
    )
    assert read.returncode == 0, read.stderr


@pytest.mark.skipif(shutil.which("docker") is None, reason="needs docker's client: apt-get install docker-cli")
@pytest.mark.parametrize(("options", "fault"), [("", "the Docker daemon"), ("--no-such-option", "unknown flag")])
def test_docker_reads_the_commands_of_the_page(options: str, fault: str) -> None:
    """They come as far as looking for an engine, which an option that docker does not know does not."""
    [block] = blocks_for(Path(__file__))
    for line in block.text.splitlines():
        docker, verb, *words = shlex.split(line)
        done = subprocess.run(
            [docker, verb, *options.split(), *words], env={**os.environ, "DOCKER_HOST": "unix:///nonexistent"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert fault in done.stderr
        assert "deprecated" not in done.stderr


@pytest.mark.skipif(
    not all(map(shutil.which, ("ssh", "ssh-keygen", "/usr/sbin/sshd"))),
    reason="needs ssh and sshd: apt-get install openssh-server openssh-client",
)
def test_the_hosts_of_the_cluster_let_one_another_in(tmp_path: Path) -> None:
    """Only with the keys that the service ``keys`` has made, and as the user that sshd runs as."""
    compose = ROOT / "docker" / "compose.cluster.yaml"
    tmp_path.chmod(0o700)
    make = _services(compose)["keys"]["command"][-1].replace("$$", "$").replace("/keys", str(tmp_path))
    for _ in range(2):  # the second time, it keeps what is there
        subprocess.run(["sh", "-c", make], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name in ("ssh.conf", "sshd.conf"):
        text = (ROOT / "docker" / "ssh" / name).read_text()
        (tmp_path / name).write_text(text.replace("/keys", str(tmp_path)).replace("Port 2222", f"Port {port}"))
    os.makedirs("/run/sshd", exist_ok=True)  # where root's sshd wants it; the image's is not root's
    sshd = ["/usr/sbin/sshd", "-D", "-e", "-f", f"{tmp_path}/sshd.conf", "-o", "StrictModes=no"]  # /tmp is everybody's
    daemon = subprocess.Popen(sshd, stderr=subprocess.PIPE)
    try:
        ssh = ["ssh", "-F", f"{tmp_path}/ssh.conf", "127.0.0.1", "echo $PATH"]
        done = subprocess.run(ssh, capture_output=True, text=True, check=False, timeout=60)
        assert "/opt/venv/bin:" in done.stdout, done.stderr  # the shell may add to it
        stranger = [*ssh[:3], "-o", f"IdentityFile={tmp_path / 'host'}", "-o", "IdentitiesOnly=yes", *ssh[3:]]
        (tmp_path / "ssh.conf").write_text((tmp_path / "ssh.conf").read_text().replace("IdentityFile", "#"))
        refused = subprocess.run(stranger, capture_output=True, text=True, check=False, timeout=60)
        assert (refused.returncode, "Permission denied" in refused.stderr) == (255, True)
    finally:
        daemon.terminate()
        daemon.communicate()
