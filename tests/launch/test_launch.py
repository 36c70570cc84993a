"""Launch detection: what real launchers said, recorded in launch_environments/, and what overrides it.

What is missing or wrong is in test_broken_environments.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import TESTS

from unitrain.errors import LaunchError
from unitrain.launch.detect import LAUNCHERS, Launch, detect
from unitrain.launch.slurm import PORTS, first_host_of_groups, hosts, step_port

RECORDED: dict[str, list[dict[str, str]]] = {
    path.stem: json.loads(path.read_text())["environments"]
    for path in sorted((TESTS / "launch_environments").glob("*.json"))
}
BY_HAND = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def place(launcher: str, rank: int, world_size: int = 2, **changes: Any) -> Launch:
    """Return the launch of a job on one host, with ``changes``."""
    expected: dict[str, Any] = {"local_rank": rank, "local_world_size": world_size, "node_rank": 0, **changes}
    return Launch(launcher, rank=rank, world_size=world_size, **expected)


def on_one_host(launcher: str, **changes: Any) -> list[Launch]:
    return [place(launcher, rank, **changes) for rank in range(2)]


def on_two_nodes(**changes: Any) -> list[Launch]:
    """Return the launch of three tasks that srun has started on two nodes."""
    return [
        place(
            "srun",
            rank,
            3,
            local_rank=rank % 2,
            local_world_size=2 - rank // 2,
            node_rank=rank // 2,
            rendezvous="tcp",
            **changes,
        )
        for rank in range(3)
    ]


EXPECTED: dict[str, list[Launch]] = {
    "torchrun": on_one_host("torchrun", rendezvous="served", address="localhost:43729"),
    "torchrun-restarted": on_one_host("torchrun", rendezvous="served", address="localhost:46191"),
    "torchrun-two-nodes": [
        place(
            "torchrun",
            rank,
            4,
            local_rank=rank % 2,
            local_world_size=2,
            node_rank=rank // 2,
            rendezvous="served",
            address="127.0.0.1:29517",
        )
        for rank in range(4)
    ],
    "torch-distributed-launch": on_one_host("torchrun", rendezvous="served", address="localhost:34121"),
    "torchrun-inside-srun": on_one_host("torchrun", rendezvous="served", address="localhost:35943"),
    "horovodrun-gloo": on_one_host("horovodrun", rendezvous="horovod", address="127.0.0.1:14902"),
    "horovodrun-mpi": on_one_host("mpirun", rendezvous="mpi", mpi="Open MPI 4"),
    "openmpi-4": on_one_host("mpirun", rendezvous="mpi", mpi="Open MPI 4"),
    "openmpi-4-inside-srun": on_one_host("mpirun", rendezvous="mpi", mpi="Open MPI 4"),
    "openmpi-5": on_one_host("mpirun", rendezvous="mpi", mpi="Open MPI 5"),
    "mpich": on_one_host("mpirun", rendezvous="mpi", mpi="MPICH"),
    "intel-mpi": on_one_host("mpirun", rendezvous="mpi", mpi="MPICH"),
    "srun": on_one_host("srun", rendezvous="tcp", address="127.0.0.1:21010", step="10.0"),
    "srun-pmi2": on_one_host("srun", rendezvous="tcp", address="127.0.0.1:21212", step="12.0"),
    "srun-inside-sbatch": on_one_host("srun", rendezvous="tcp", address="127.0.0.1:21616", step="16.0"),
    "srun-inside-srun-pty": on_one_host("srun", rendezvous="tcp", address="127.0.0.1:22122", step="21.1"),
    "srun-two-nodes": on_two_nodes(address="node0:21111", step="11.0"),
    "srun-heterogeneous": on_two_nodes(address="node1:23030", step="30.0"),
    "srun-het-group": on_two_nodes(address="node1:23232", step="32.0"),
    "srun-pty": [Launch("python")],
    "sbatch": [Launch("python")],
    "salloc": [Launch("python")],
    "salloc-interactive-step": [Launch("python")],
}


def without_evidence(launch: Launch) -> Launch:
    return Launch(**{**vars(launch), "evidence": ()})


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_environment(name: str) -> None:
    found = [detect(environ) for environ in RECORDED[name]]
    assert [without_evidence(launch) for launch in found] == EXPECTED[name]
    assert all(launch.launcher in LAUNCHERS for launch in found)


def test_every_expectation_is_recorded() -> None:
    assert set(EXPECTED) == set(RECORDED)


@given(st.data())
def test_no_environment_breaks_detection(data: st.DataObject) -> None:
    environ = dict(data.draw(st.sampled_from([environ for recorded in RECORDED.values() for environ in recorded])))
    for name in data.draw(st.lists(st.sampled_from(sorted(environ)), max_size=4)):
        environ[name] = data.draw(st.text(max_size=5) | st.integers(-1, 70000).map(str))
    try:
        launch = detect(environ)
    except LaunchError:
        return
    assert 0 <= launch.rank < launch.world_size
    assert 0 <= launch.local_rank < launch.local_world_size <= launch.world_size


def test_nothing_is_plain_python() -> None:
    assert detect({}) == Launch("python")
    assert detect({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "bash"}) == Launch("python")


def test_set_by_hand() -> None:
    launch = without_evidence(detect(BY_HAND))
    assert launch == place(
        "env", 1, 4, local_world_size=2, node_rank=None, rendezvous="tcp", address="node0:29500"
    )  # two hosts: which one this is shows when they talk


def test_set_by_hand_on_one_host() -> None:
    environ = {**BY_HAND, "MASTER_ADDR": "127.0.0.1"}
    del environ["LOCAL_WORLD_SIZE"]
    assert detect(environ).local_world_size == 4
    assert detect(environ).node_rank == 0


def test_several_hosts_under_mpirun() -> None:
    environ = {**RECORDED["openmpi-4"][0], "OMPI_COMM_WORLD_SIZE": "4"}
    assert detect(environ).node_rank is None


def test_master_given_by_hand_under_other_launchers() -> None:
    master = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    for name in ("openmpi-4", "mpich", "srun", "horovodrun-gloo"):
        launch = detect({**RECORDED[name][0], **master})
        assert (launch.rendezvous, launch.address) == ("tcp", "node0:29500")


def test_hosts_that_come_and_go() -> None:
    recorded = RECORDED["horovodrun-gloo"][0]
    assert not detect(recorded).elastic
    assert detect({**recorded, "HOROVOD_ELASTIC": "1", "HOROVOD_HOSTNAME": "node0"}).elastic
    with pytest.raises(LaunchError, match="HOROVOD_HOSTNAME is not set, but must be set"):
        detect({**{n: v for n, v in recorded.items() if n != "HOROVOD_HOSTNAME"}, "HOROVOD_ELASTIC": "1"})


def test_override() -> None:
    inside_srun = RECORDED["torchrun-inside-srun"][0]
    assert detect({**inside_srun, "UNITRAIN_LAUNCHER": "python"}).world_size == 1
    assert detect({**inside_srun, "UNITRAIN_LAUNCHER": "srun"}).launcher == "srun"
    assert detect({**RECORDED["mpich"][0], "UNITRAIN_LAUNCHER": "mpirun"}).mpi == "MPICH"


@pytest.mark.parametrize("name", ["sruin", "", "TORCHRUN"])
def test_override_with_no_launcher(name: str) -> None:
    with pytest.raises(LaunchError, match=rf"UNITRAIN_LAUNCHER is '{name}', but must be one of torchrun, "):
        detect({"UNITRAIN_LAUNCHER": name})


def test_override_with_a_launcher_that_is_not_there() -> None:
    with pytest.raises(LaunchError, match=r"OMPI_COMM_WORLD_SIZE is not set.*Start the job with mpirun"):
        detect({"UNITRAIN_LAUNCHER": "mpirun"})


def test_hand_and_launcher_contradict() -> None:
    environ = {**RECORDED["srun"][1], "RANK": "0", "WORLD_SIZE": "1"}
    with pytest.raises(
        LaunchError, match=r"according to srun .* rank 1 of 2, but according to RANK and WORLD_SIZE rank '0' of '1'"
    ):
        detect(environ)
    assert detect({**environ, "UNITRAIN_LAUNCHER": "srun"}).rank == 1
    assert detect({**environ, "RANK": "1", "WORLD_SIZE": "2"}).launcher == "srun"


def test_pmix_launcher_without_a_world_size() -> None:
    with pytest.raises(LaunchError, match=r"PMIX_RANK is '1'.*Use mpirun"):
        detect({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun"})
    assert detect({"PMIX_RANK": "1", "UNITRAIN_LAUNCHER": "python"}) == Launch("python")


def test_mpt_does_not_tell_the_world_size() -> None:
    with pytest.raises(LaunchError, match=r"MPT_LRANK is '0', .* started by mpiexec_mpt of HPE's MPT.* WORLD_SIZE"):
        detect({"MPT_LRANK": "0"})


# Of launchers that can't be installed here: the names are those that public job scripts and libraries read.
DOCUMENTED = {
    "jsrun": {f"JSM_NAMESPACE_{name}": value for name, value in zip(
        ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), ("3", "4", "1", "2"), strict=True)},
    "PALS": {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PALS_NODEID": "1",
             "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1"},
    "Flux": {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"},
    "Flux with PMI": {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2",
                      "PMI_FD": "9", "PMI_RANK": "3", "PMI_SIZE": "4"},
    "MVAPICH2": {f"MV2_COMM_WORLD_{name}": value for name, value in zip(
        ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), ("3", "4", "1", "2"), strict=True)},
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_environment(name: str) -> None:
    environ = DOCUMENTED[name]
    node_rank = 1 if name == "PALS" else None
    expected = place(
        "mpirun", 3, 4, local_rank=1, local_world_size=2, node_rank=node_rank, rendezvous="mpi", mpi="MPICH"
    )
    assert without_evidence(detect(environ)) == expected
    by_address = detect({**environ, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    assert (by_address.rendezvous, by_address.address) == ("tcp", "node0:29500")


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_variable_that_is_missing_is_named_with_the_launcher_s_own_command(name: str) -> None:
    size = next(variable for variable in DOCUMENTED[name] if variable.endswith("_SIZE") and "LOCAL" not in variable)
    environ = {key: value for key, value in DOCUMENTED[name].items() if key != size}
    command = {"jsrun": "jsrun -n", "PALS": "mpiexec -n N --ppn", "MVAPICH2": "mpirun_rsh -np"}.get(name, "flux run -n")
    with pytest.raises(LaunchError, match=f"{size} is not set.*Start the job with {command}"):
        detect(environ)


def test_batch_script_that_inherited_a_step() -> None:
    stale = {key: RECORDED["srun"][1][key] for key in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")}
    batch = {**RECORDED["sbatch"][0], **stale, "SLURM_NTASKS": "3"}
    with pytest.raises(
        LaunchError,
        match=r"SLURM_STEP_NUM_TASKS is '2', but must be '3', the value of SLURM_NTASKS.*UNITRAIN_LAUNCHER=python",
    ):
        detect(batch)


def test_detection_imports_no_engine() -> None:
    script = "import os, sys, unitrain.launch.detect as l; l.detect(os.environ); print(*sys.modules)"
    environ = {**RECORDED["openmpi-4"][0], "PATH": ""}
    run = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert not {"mpi4py", "horovod"} & set(run.stdout.split())


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("node0", "node0"),
        ("node0,node1", "node0 node1"),
        ("gpu[03-05,9],cpu1", "gpu03 gpu04 gpu05 gpu9 cpu1"),
        ("gpu[9,098-100]", "gpu9 gpu098 gpu099 gpu100"),
        ("rack[1-2]n[01-02]-ib", "rack1n01-ib rack1n02-ib rack2n01-ib rack2n02-ib"),
        ("login.example.org,gpu[1-2]", "login.example.org gpu1 gpu2"),
        ("", ""),
        ("gpu[", "gpu"),
        ("gpu[x-y]", "gpux-y"),
    ],
)
def test_hosts(nodes: str, expected: str) -> None:
    assert hosts(nodes) == expected.split()


def test_rank_0_of_a_heterogeneous_step_is_on_a_host_of_its_first_group() -> None:
    groups = ["gpu[7-8]", "cpu[1-9]", "big1"]
    assert first_host_of_groups("cpu[1-9],gpu[7-8]", groups) == "gpu7"
    assert first_host_of_groups("big1,cpu[4-6]", groups) == "cpu4"
    assert first_host_of_groups("gpu8", groups) == "gpu8"
    assert first_host_of_groups("other", groups) is None


def test_variables_of_another_heterogeneous_job_are_ignored() -> None:
    own = RECORDED["srun-two-nodes"][0]
    stale = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "7", "SLURM_JOB_NODELIST_HET_GROUP_0": "node1"}
    assert detect({**own, **stale}).address == detect(own).address


def test_step_port() -> None:
    ports = [step_port(job, step) for job in range(1000, 1010) for step in range(101)]
    assert len(set(ports)) == len(ports)
    assert len({step_port(job, 0) for job in range(10_000)}) == 10_000
    assert all(port in PORTS for port in ports)
    assert step_port(2**31, 2**31) in PORTS
