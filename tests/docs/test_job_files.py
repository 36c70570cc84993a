"""The job files on the pages: each is checked by its tool or the operator's published model, and starts a training."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_ports import free_port
from host_commands import AS_ROOT, blocks_for, on_hosts
from page_blocks import blocks
from places import ROOT
from slurm import Slurm
from trained import TRAINS, Weights, assert_trained, expected

__all__ = ["expected"]  # the fixture
FILES = {block.title: block.text for block in blocks_for(Path(__file__))}
FILES |= {block.title: block.text for block in blocks(ROOT / "docs" / "launchers" / "slurm.md") if block.title}


def path() -> str:
    """Return PATH with the programs of this environment first, as those of an activated one."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def document(title: str, script: Path | str, *flags: str, processes: int = 8) -> Any:
    """Return a YAML file of a page, for another script and another number of processes of a host."""
    text = on_hosts(FILES[title], ["node0", "node1"], processes=processes)
    shown = re.search(r'train\.py(, --epochs, "90")?', text)
    assert shown is not None
    return yaml.safe_load(text.replace(shown[0], ", ".join(map(json.dumps, [str(script), *flags]))))


def assert_the_operator_takes(document: dict[str, Any], model: str) -> None:
    """Assert that an operator's own model takes a job without a change, and Kubernetes its pods."""
    import kubeflow.training
    import kubernetes_validate

    class Response:
        data = json.dumps(document)

    client = kubeflow.training.ApiClient()
    parsed = client.deserialize(Response, model)
    assert client.sanitize_for_serialization(parsed) == document  # no key that the model lacks was dropped
    [replicas] = [value for key, value in document["spec"].items() if key.endswith("ReplicaSpecs")]
    for replica in replicas.values():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": replica["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.usefixtures("forked")
def test_pytorchjob(expected: Weights, tmp_path: Path) -> None:
    """torchrun in each pod, with the variables that the operator sets (1.7 and newer)."""
    assert_the_operator_takes(document("pytorchjob.yaml", "train.py"), "KubeflowOrgV1PyTorchJob")
    spec = document("pytorchjob.yaml", TRAINS, str(tmp_path), processes=1)["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    assert [replicas[name]["replicas"] for name in ("Master", "Worker")] == [1, 1]
    [container] = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    train_in_pods(container["command"], spec["nprocPerNode"])
    assert_trained(tmp_path, expected, world_size=2)


@pytest.mark.all("a launcher; the file of PyTorchJob is started in make test")
@pytest.mark.usefixtures("forked")
def test_trainjob(expected: Weights, tmp_path: Path) -> None:
    """torchrun in each pod, with the variables that the runtime torch-distributed sets."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    job = document("trainjob.yaml", TRAINS, str(tmp_path), processes=1)
    parsed = TrainerV1alpha1TrainJob.from_dict(job)
    assert parsed is not None
    assert parsed.to_dict() == job, "no key that the model lacks was dropped"
    [patch] = job["spec"]["runtimePatches"]
    [replicated] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert (replicated["name"], pod["containers"][0]["name"]) == ("node", "node"), "as torch-distributed has them"
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    train_in_pods(trainer["command"], trainer["numProcPerNode"])
    assert_trained(tmp_path, expected, world_size=2)


def train_in_pods(command: list[str], processes: object) -> None:
    """Run the command of a container in two pods, with the variables that an operator sets for torchrun."""
    given = {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": str(processes), "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PATH": path(),
    }  # fmt: skip
    environ = {**os.environ, **given}
    pods = [subprocess.Popen(command, env={**environ, "PET_NODE_RANK": rank, "RANK": rank}) for rank in "01"]
    assert [pod.wait(120) for pod in pods] == [0, 0]


@pytest.mark.all("a launcher; the file of PyTorchJob is started in make test")
@pytest.mark.usefixtures("forked")
def test_mpijob(expected: Weights, tmp_path: Path) -> None:
    """Mpirun in the launcher, with the hosts in the file that the operator names."""
    shown = document("mpijob.yaml", "train.py")
    assert_the_operator_takes(shown, "KubeflowOrgV1MPIJob")
    job = document("mpijob.yaml", TRAINS, str(tmp_path), processes=1)["spec"]
    [container] = job["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    hosts = tmp_path / "hostfile"
    hosts.write_text(f"localhost slots={job['slotsPerWorker'] * job['mpiReplicaSpecs']['Worker']['replicas']}\n")
    given = {"OMPI_MCA_orte_default_hostfile": str(hosts), "PATH": path()}
    subprocess.run(container["command"], env={**os.environ, **given, **AS_ROOT}, check=True, timeout=120)
    assert_trained(tmp_path, expected, world_size=2)


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="needs Compose: apt-get install docker-compose")
def test_compose(tmp_path: Path) -> None:
    """Compose's own parser takes it, and each container gets GPUs of its own."""
    file = tmp_path / "compose.yaml"
    file.write_text(FILES["compose.yaml"])
    shown = subprocess.run(
        ["docker-compose", "--file", str(file), "config"], capture_output=True, text=True, check=True, timeout=60
    )
    services = yaml.safe_load(shown.stdout)["services"]
    assert sorted(services) == ["node0", "node1"]
    for name, service in services.items():
        assert service["command"][1:3] == ["--nnodes=2", "--nproc-per-node=2"]
        assert "--rdzv-endpoint=node0:29400" in service["command"]
        assert service["hostname"] == name
    reserved = [services[name]["deploy"]["resources"]["reservations"]["devices"][0] for name in sorted(services)]
    assert [device["device_ids"] for device in reserved] == [["0", "1"], ["2", "3"]]


def script_in(folder: Path, title: str) -> Path:
    """Write the batch script of a page for this host, which has no GPU, with two processes in all."""
    text = FILES[title].replace("-hex 32", "-hex 33")  # no number of processes
    text = on_hosts(text, [], processes=1).replace("train.py", f"{TRAINS} {folder}")
    text = text.replace("29400", str(free_port())).replace("$(hostname)", "127.0.0.1")
    script = folder / title
    script.write_text(re.sub(r"#SBATCH --gpus.*\n", "", text))
    return script


@pytest.mark.launcher
@pytest.mark.xdist_group("slurm")
@pytest.mark.usefixtures("forked")
def test_slurm(slurm: Slurm, expected: Weights, tmp_path: Path) -> None:
    script, log = script_in(tmp_path, "job.sh"), tmp_path / "job.log"
    subprocess.run(
        ["sbatch", "--wait", "--oversubscribe", f"--output={log}", str(script)],
        env={**slurm.env, "PATH": path()}, cwd=tmp_path, check=True, timeout=120,
    )  # fmt: skip
    assert_trained(tmp_path, expected, world_size=2)


# As its documentation says: it gives each task these variables.
FLUX = """#!/bin/bash
while [[ $1 == run || $1 == --* ]]; do
    [[ $1 == --ntasks=* ]] && tasks=${1#*=}
    shift
done
for ((rank = 0; rank < tasks; rank++)); do
    FLUX_TASK_RANK=$rank FLUX_JOB_SIZE=$tasks FLUX_TASK_LOCAL_ID=$rank FLUX_JOB_NNODES=1 "$@" &
done
wait -n && wait -n
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("kind", ["flux", "pbs", pytest.param("lsf", marks=pytest.mark.soak)])
def test_a_script_for_a_scheduler(kind: str, expected: Weights, tmp_path: Path) -> None:
    """The scheduler's lines are comments here. Below them, the script does what it does in a job on this host."""
    hosts, flux = tmp_path / "hosts", tmp_path / "flux"
    hosts.write_text("localhost\n" * 2)
    flux.write_text(FLUX)
    flux.chmod(0o755)
    given = {
        "pbs": {"PBS_NODEFILE": str(hosts), "PBS_O_WORKDIR": str(tmp_path)},
        "lsf": {"LSB_DJOB_HOSTFILE": str(hosts)},
        "flux": {},
    }
    environ = {**os.environ, **AS_ROOT, **given[kind], "UNITRAIN_BACKEND": "ddp", "PATH": f"{tmp_path}:{path()}"}
    subprocess.run(["bash", str(script_in(tmp_path, f"{kind}.sh"))], env=environ, check=True, timeout=120)
    assert_trained(tmp_path, expected, world_size=2)


@pytest.mark.launcher
@pytest.mark.usefixtures("forked")
@pytest.mark.soak  # Ray starts a dozen processes of its own
@pytest.mark.parametrize("killed_at", [None, "8"])
def test_ray(killed_at: str | None, expected: Weights, tmp_path: Path) -> None:
    """Ray Train's processes, and its process group. One that is killed is started again, and goes on."""
    # As a user would, from the folder of the script.
    shutil.copy(TRAINS, tmp_path / "train.py")
    flags = [str(tmp_path), *([killed_at] if killed_at else [])]
    text = FILES["on_ray.py"].replace('"--epochs", "90"', ", ".join(map(json.dumps, flags)))
    driver = tmp_path / "on_ray.py"
    driver.write_text(text.replace("num_workers=16, use_gpu=True", "num_workers=2, use_gpu=False"))
    environ = {
        **os.environ, "RAY_TMPDIR": "/tmp", "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(driver)], cwd=tmp_path, env=environ,
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "killed").exists() == (killed_at is not None)
    assert_trained(tmp_path, expected, world_size=2)
