"""Job files: each is checked by its own tool or the operator's published model, and what it starts trains a model."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_ports import free_port
from host_commands import blocks_for
from slurm import Slurm
from trained import TRAINS, Weights, assert_trained, expected

from unitrain.commands.cli import main
from unitrain.commands.template import KINDS, default_name, job_file

__all__ = ["expected"]  # the fixture
# What a shell, YAML, Compose and Kubernetes each would like to change.
ODD = ["--name", 'it\'s $HOME $(PWD) ${x} %d "q" #1: a\\b']


def path() -> str:
    """Return PATH with the programs of this environment first, as those of an activated one."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def template(
    kind: str,
    target: Path = Path("recipes/resnet.py"),
    *flags: str,
    hosts: int = 2,
    processes: int = 1,
    gpus: bool = False,
) -> str:
    return job_file(
        kind, target, flags, name="a-job", hosts=hosts, processes=processes, gpus=gpus, image="unitrain:cpu"
    )


# ----------------------------------------------------------------------------------------------------- the command


def test_the_command_prints_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", "--hosts", "3", "slurm", "recipes/resnet.py", "--", "--epochs", "5"]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --nodes=3\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert text.endswith("\nsrun python recipes/resnet.py --epochs 5\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "0"], "--hosts is 0, but must be at least 1"),
        (["--processes", "-1"], "--processes is -1"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", *arguments, "slurm", "a.py"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "name"),
    [("a/My_Recipe 2.py", "my-recipe-2"), ("7b.py", "b"), ("训练.py", "train"), ("x" * 99, "x" * 52)],
)
def test_default_name(script: str, name: str) -> None:
    assert default_name(Path(script)) == name
    assert job_file("slurm", Path(script), [], name=None, hosts=1, processes=1, gpus=False, image="i")


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("gpus", [True, False])
def test_gpus_are_asked_for_where_they_are_wanted(kind: str, gpus: bool) -> None:
    text = template(kind, Path("a.py"), processes=4, gpus=gpus)
    assert ("gpu" in text.lower().replace("use_gpu=false", "")) == gpus


# -------------------------------------------------------------------------------------------------------- Kubernetes


def checked(kind: str, model: str, **options: Any) -> dict[str, Any]:
    """Return a job of an operator that its own model takes, and whose pods Kubernetes takes, without a change."""
    import kubeflow.training
    import kubernetes_validate

    document = yaml.safe_load(template(kind, **options))

    class Response:
        data = json.dumps(document)

    client = kubeflow.training.ApiClient()
    parsed = client.deserialize(Response, model)
    assert client.sanitize_for_serialization(parsed) == document  # no key that the model lacks was dropped
    [replicas] = [value for key, value in document["spec"].items() if key.endswith("ReplicaSpecs")]
    for replica in replicas.values():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": replica["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    assert isinstance(document, dict)
    return document


def in_shell_of_kubernetes(words: list[str]) -> list[str]:
    """Return what a container gets of its command, where no variable is set."""
    return [word.replace("$$(", "$(") for word in words]


@pytest.mark.usefixtures("forked")
def test_pytorchjob(expected: Weights, tmp_path: Path) -> None:
    """torchrun in each pod, with the variables that the operator sets (1.7 and newer)."""
    spec = checked("pytorchjob", "KubeflowOrgV1PyTorchJob", target=TRAINS, hosts=3)["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    assert [replicas[name]["replicas"] for name in ("Master", "Worker")] == [1, 2]

    flags = [str(tmp_path), *ODD]
    document = yaml.safe_load(template("pytorchjob", TRAINS, *flags))
    [container] = document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    command = in_shell_of_kubernetes(container["command"])
    assert command == ["torchrun", str(TRAINS), *flags]
    trained_in_pods(container["command"], document["spec"]["nprocPerNode"], tmp_path)
    assert_trained(tmp_path, expected, world_size=2)


@pytest.mark.usefixtures("forked")
def test_trainjob(expected: Weights, tmp_path: Path) -> None:
    """torchrun in each pod, with the variables that the runtime torch-distributed sets."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    document = yaml.safe_load(template("trainjob", TRAINS, *[str(tmp_path), *ODD], hosts=3))
    parsed = TrainerV1alpha1TrainJob.from_dict(document)
    assert parsed is not None
    assert parsed.to_dict() == document, "no key that the model lacks was dropped"
    trainer = document["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["resourcesPerNode"]) == (3, {"limits": {}})
    [patch] = document["spec"]["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert (job["name"], pod["containers"][0]["name"]) == ("node", "node"), "as torch-distributed has them"
    document = yaml.safe_load(template("trainjob", TRAINS, str(tmp_path)))
    trained_in_pods(document["spec"]["trainer"]["command"], document["spec"]["trainer"]["numProcPerNode"], tmp_path)
    assert_trained(tmp_path, expected, world_size=2)


def trained_in_pods(command: list[str], processes: object, folder: Path) -> None:
    """Run the command of a container in two pods, with the variables that an operator sets for torchrun."""
    given = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": str(processes),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "PATH": path(),
    }
    words = [*in_shell_of_kubernetes(command)[:2], str(folder)]
    pods = [subprocess.Popen(words, env={**os.environ, **given, "PET_NODE_RANK": rank, "RANK": rank}) for rank in "01"]
    assert [pod.wait(120) for pod in pods] == [0, 0]


@pytest.mark.usefixtures("forked")
def test_mpijob(expected: Weights, tmp_path: Path) -> None:
    """Mpirun in the launcher, with the hosts in the file that the operator names."""
    spec = checked("mpijob", "KubeflowOrgV1MPIJob", target=TRAINS, processes=2)["spec"]
    assert spec["slotsPerWorker"] == spec["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    document = yaml.safe_load(template("mpijob", TRAINS, str(tmp_path)))
    [container] = document["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    hosts = tmp_path / "hostfile"
    hosts.write_text("localhost slots=2\n")
    given = {"OMPI_MCA_orte_default_hostfile": str(hosts), "PATH": path()}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = in_shell_of_kubernetes(container["command"])
    subprocess.run(command, env={**os.environ, **given, **as_root}, check=True, timeout=120)
    assert_trained(tmp_path, expected, world_size=2)


# ------------------------------------------------------------------------------------------------------------ Compose


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="needs Compose: apt-get install docker-compose")
@pytest.mark.parametrize("gpus", [True, False])
def test_compose(gpus: bool, tmp_path: Path) -> None:
    """Compose's own parser takes it, and each container gets the flags as they are, and GPUs of its own."""
    file = tmp_path / "compose.yaml"
    file.write_text(template("compose", Path("a b.py"), *ODD, processes=2, gpus=gpus))
    shown = subprocess.run(
        ["docker-compose", "--file", str(file), "config"], capture_output=True, text=True, check=True, timeout=60
    )
    # It shows $ as it is written in a file.
    services = yaml.safe_load(shown.stdout.replace("$$", "$"))["services"]
    assert sorted(services) == ["node0", "node1"]
    for service in services.values():
        assert service["command"][-3:] == ["a b.py", *ODD]
        assert service["command"][1:3] == ["--nnodes=2", "--nproc-per-node=2"]
    if gpus:
        reserved = [services[name]["deploy"]["resources"]["reservations"]["devices"][0] for name in sorted(services)]
        assert [device["device_ids"] for device in reserved] == [["0", "1"], ["2", "3"]]


# -------------------------------------------------------------------------------------------------------------- SLURM


@pytest.mark.launcher
@pytest.mark.xdist_group("slurm")
@pytest.mark.usefixtures("forked")
def test_slurm(slurm: Slurm, expected: Weights, tmp_path: Path) -> None:
    script, log = tmp_path / "job.sh", tmp_path / "job.log"
    script.write_text(template("slurm", TRAINS, str(tmp_path)))
    environ = {**slurm.env, "PATH": path()}
    subprocess.run(
        ["sbatch", "--wait", "--oversubscribe", f"--output={log}", str(script)],
        env=environ, cwd=tmp_path, check=True, timeout=120,
    )  # fmt: skip
    assert_trained(tmp_path, expected, world_size=2)


@pytest.mark.launcher
@pytest.mark.xdist_group("slurm")
def test_slurm_takes_odd_flags(slurm: Slurm, tmp_path: Path) -> None:
    shows = tmp_path / "shows.py"
    shows.write_text("import sys; print(sys.argv[1:])\n")
    script, log = tmp_path / "job.sh", tmp_path / "job.log"
    script.write_text(template("slurm", shows, *ODD, hosts=1))
    environ = {**slurm.env, "PATH": path()}
    subprocess.run(
        ["sbatch", "--wait", f"--output={log}", str(script)], env=environ, cwd=tmp_path, check=True, timeout=120
    )
    assert log.read_text().strip() == str(ODD)


# ------------------------------------------------------------------------------------------------- PBS, LSF and Flux

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
@pytest.mark.parametrize("kind", ["flux", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("pbs", "lsf"))])
def test_a_script_for_a_scheduler(kind: str, expected: Weights, tmp_path: Path) -> None:
    """The scheduler's lines are comments here. Below them, the script does what it does in a job on this host."""
    script, hosts, flux = tmp_path / "job.sh", tmp_path / "hosts", tmp_path / "flux"
    text = template(kind, TRAINS, str(tmp_path), hosts=1, processes=2)
    script.write_text(text.replace("29400", str(free_port())).replace("$(hostname)", "127.0.0.1"))
    hosts.write_text("localhost\n" * 2)
    flux.write_text(FLUX)
    flux.chmod(0o755)
    told = {
        "pbs": {"PBS_NODEFILE": str(hosts), "PBS_O_WORKDIR": str(tmp_path)},
        "lsf": {"LSB_DJOB_HOSTFILE": str(hosts)},
    }
    environ = {**os.environ, **told.get(kind, {}), "UNITRAIN_BACKEND": "ddp", "PATH": f"{tmp_path}:{path()}"}
    subprocess.run(["bash", str(script)], env=environ, check=True, timeout=120)
    assert_trained(tmp_path, expected, world_size=2)


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("pbs", ["#PBS -l select=2:ncpus=32:mpiprocs=8:ngpus=8"]),
        ("lsf", ["#BSUB -n 16", '#BSUB -R "span[ptile=8]"', '#BSUB -gpu "num=8"']),
        ("flux", ["#flux: --nodes=2 --nslots=16 --cores-per-slot=4 --gpus-per-slot=1"]),
    ],
)
def test_what_a_script_asks_its_scheduler_for(kind: str, lines: list[str]) -> None:
    text = template(kind, Path("a b.py"), *ODD, processes=8, gpus=True)
    assert set(lines) <= set(text.splitlines())
    assert shlex.split(text.splitlines()[-1])[-len(ODD) :] == ODD


# ---------------------------------------------------------------------------------------------------------------- Ray


@pytest.mark.launcher
@pytest.mark.usefixtures("forked")
@pytest.mark.soak  # Ray starts a dozen processes of its own
@pytest.mark.parametrize("killed_at", [None, "8"])
def test_ray(killed_at: str | None, expected: Weights, tmp_path: Path) -> None:
    """Ray Train's processes, and its process group. One that is killed is started again, and goes on."""
    # As a user would, from the folder of the script.
    shutil.copy(TRAINS, tmp_path / "trains.py")
    flags = [str(tmp_path), *([killed_at] if killed_at else [])]
    drive(template("ray", Path("trains.py"), *flags, hosts=1, processes=2), tmp_path)
    assert (tmp_path / "killed").exists() == (killed_at is not None)
    assert_trained(tmp_path, expected, world_size=2)


@pytest.mark.launcher
@pytest.mark.soak
def test_what_the_page_of_ray_shows(expected: Weights, tmp_path: Path) -> None:
    [block] = blocks_for(Path(__file__))
    shown = block.text.replace("num_workers=8, use_gpu=True", "num_workers=2, use_gpu=False")
    assert shown != block.text
    argv = ["train.py", str(tmp_path)]
    main = f"import runpy, sys\n\ndef main():\n    sys.argv = {argv}\n    runpy.run_path({str(TRAINS)!r})\n"
    drive(f"{main}\n{shown}", tmp_path)
    assert_trained(tmp_path, expected, world_size=2)


def drive(text: str, folder: Path) -> None:
    """Run a driver of Ray in a folder."""
    script = folder / "on_ray.py"
    script.write_text(text)
    environ = {
        **os.environ,
        "RAY_TMPDIR": "/tmp",
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
