"""A launcher's variable that is missing or wrong, each in turn: a message that names it, at once, from a real process.

What is not looked at may be anything, so long as nothing else changes with it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest
from jobs import run_job
from needs import HOROVOD
from ranks import run_ranks
from test_launch import BY_HAND, RECORDED, without_evidence

import unitrain
from unitrain import CommunicationError, Launch, LaunchError
from unitrain.launch.detect import detect

ON_ONE_HOST = {name: value for name, value in BY_HAND.items() if name != "LOCAL_WORLD_SIZE"} | {"MASTER_ADDR": "::1"}
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
JOBS = {name: environments[-1] for name, environments in RECORDED.items() if detect(environments[-1]).world_size > 1}
JOBS |= {"env": BY_HAND, "env-one-host": ON_ONE_HOST, "mpirun with a master": {**JOBS["openmpi-4"], **MASTER}}

WRONG = (None, "", "abc", "-1", "1.5", "²", "9" * 8, "9" * 40)
GROUPS = {f"SLURM_JOB_NODELIST_{word}_GROUP_{number}" for word in ("HET", "PACK") for number in range(2)}
HOSTS = {"MASTER_ADDR", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "SLURM_STEP_NODELIST", *GROUPS}
"""Variables that name a host, or several."""
LEADERS = {"SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID_PACK_GROUP_0"}
UNBOUNDED = {"SLURM_JOB_ID", "SLURM_STEP_ID", *LEADERS}
"""Variables that may hold any number of up to ten digits."""
OPTIONAL = {"SLURM_STEP_NUM_TASKS", "HOROVOD_CPU_OPERATIONS", "SLURM_HET_SIZE"}
OPTIONAL |= LEADERS  # one of them is enough
"""Variables that need not be there."""


def with_change(environ: Mapping[str, str], name: str, value: str | None) -> dict[str, str]:
    changed = {key: text for key, text in environ.items() if key != name}
    return changed if value is None else {**changed, name: value}


def is_wrong(name: str, value: str | None) -> bool:
    """Whether this process can know that the value is wrong."""
    if value is None:
        return name not in OPTIONAL
    if name in HOSTS:
        return value not in ("abc", "²")
    return not (name in UNBOUNDED and value == "9" * 8)


READ = {job: [line.partition("=")[0] for line in detect(environ).evidence] for job, environ in JOBS.items()}


@pytest.mark.parametrize(("job", "name"), [(job, name) for job, names in READ.items() for name in names])
def test_a_variable_that_is_read_must_be_right(job: str, name: str) -> None:
    launcher = detect(JOBS[job]).launcher
    for value in WRONG:
        if not is_wrong(name, value):
            continue
        with pytest.raises(LaunchError) as raised:
            detect(with_change(JOBS[job], name, value))
        message = str(raised.value)
        state = "is not set" if value is None else f"is {value!r}"
        assert message.startswith(f"{name} {state}, but must be ")
        assert launcher in message or launcher == "env"
        assert "UNITRAIN_LAUNCHER=python" in message
        assert raised.value.exit_code == 2


@pytest.mark.parametrize("job", JOBS)
def test_a_variable_that_is_not_read_changes_nothing(job: str) -> None:
    environ = JOBS[job]
    launch = without_evidence(detect(environ))
    # Among the variables of another launcher around this one, some tell whether it is there at all.
    outer = {name for name in environ if name.startswith("SLURM_STEP_")} if launch.launcher != "srun" else set()
    for name in environ.keys() - READ[job] - outer:
        for value in WRONG:
            assert without_evidence(detect(with_change(environ, name, value))) == launch, (name, value)


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("node0", True),
        ("gpu-1.example.org", True),
        ("node_0.", True),
        ("10.0.0.7", True),
        ("::1", True),
        ("fe80::1%eth0", True),
        ("node0:29500", False),
        ("http://node0", False),
        ("node 0", False),
        ("-node", False),
        ("10.0.0.300", False),
        ("10.0.0", False),
        (".", False),
    ],
)
def test_what_can_be_a_host(host: str, is_one: bool) -> None:
    environ = {**BY_HAND, "MASTER_ADDR": host}
    if is_one:
        assert detect(environ).address == f"{host}:29500"
    else:
        with pytest.raises(LaunchError, match=r"MASTER_ADDR is .*, but must be a host name or address"):
            detect(environ)


def test_a_variable_that_contradicts_another() -> None:
    with pytest.raises(LaunchError, match="HOROVOD_CROSS_SIZE is '2', but must be an integer from 1 to 1"):
        detect({**JOBS["horovodrun-gloo"], "HOROVOD_CROSS_SIZE": "2"})


def start(name: str, value: str | None, backend: str) -> tuple[float, str]:
    """Return how long init took, and the error that it ended with."""
    if "HOROVOD_RANK" in os.environ:
        import_module("horovod.torch")
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    began = time.monotonic()
    try:
        unitrain.init(backend=backend, timeout_s=30)
    except (LaunchError, CommunicationError) as error:
        return time.monotonic() - began, str(error)
    return time.monotonic() - began, "nothing"


# The tests above have the other variables.
SAMPLE: list[tuple[Literal["spawn", "horovodrun"], str, str, str | None]] = [
    ("spawn", "auto", "WORLD_SIZE", None),
    ("spawn", "auto", "MASTER_ADDR", "no.such.host.invalid"),
    ("spawn", "auto", "MASTER_ADDR", "256.0.0.1"),
    ("horovodrun", "auto", "HOROVOD_CROSS_SIZE", "77"),
    ("horovodrun", "auto", "HOROVOD_GLOO_IFACE", "abc0"),
    ("horovodrun", "auto", "HOROVOD_CPU_OPERATIONS", "abc"),
    ("horovodrun", "auto", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "no.such.host.invalid"),
    ("horovodrun", "auto", "HOROVOD_GLOO_RENDEZVOUS_PORT", "1"),
    ("horovodrun", "ddp", "HOROVOD_GLOO_RENDEZVOUS_PORT", "1"),
]


@pytest.mark.parametrize(
    ("launcher", "backend", "name", "value"),
    [
        pytest.param(*case, id="-".join(map(str, case)), marks=[HOROVOD] if case[0] == "horovodrun" else [])
        for case in SAMPLE
    ],
)
def test_init_says_at_once_what_is_wrong(
    launcher: Literal["spawn", "horovodrun"], backend: str, name: str, value: str | None
) -> None:
    for seconds, message in run_ranks(start, name, value, backend, launcher=launcher, timeout=30):
        assert name in message
        assert ("is not set" if value is None else value) in message
        assert launcher in message
        assert seconds < 10.0, "and not after timeout_s"


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("environ", "said"),
    [
        pytest.param(with_change(BY_HAND, "WORLD_SIZE", None), "WORLD_SIZE is not set", id="env"),
        pytest.param({**JOBS["openmpi-5"], "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK is '2'", id="mpirun"),
        pytest.param({**JOBS["mpich"], "PMI_SIZE": ""}, "PMI_SIZE is ''", id="hydra"),
        pytest.param({**JOBS["srun"], "SLURM_LOCALID": "abc"}, "SLURM_LOCALID is 'abc'", id="srun"),
    ],
)
def test_a_script_ends_with_one_line(tmp_path: Path, environ: dict[str, Any], said: str) -> None:
    script = "import os, time, unitrain; unitrain.init"  # brings torch along
    script += "; print(time.time()); unitrain.init()"
    job = run_job([sys.executable, "-c", script], tmp_path, environ=environ)
    assert job.code == 2
    assert job.stderr.startswith(f"unitrain: error: {said}, but must be ")
    assert job.stderr.count("\n") == 1
    assert job.ended - float(job.stdout) < 10.0


def test_nobody_else_is_a_launcher() -> None:
    assert detect({"PATH": "/bin", "SLURM_CLUSTER_NAME": "abc", "HOROVOD_CYCLE_TIME": "-1"}) == Launch("python")
