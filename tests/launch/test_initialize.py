"""``unitrain.init``: the choice of backend and world, process-wide settings, and errors before any work."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from places import TESTS
from ranks import on_ranks, run_ranks
from torch import nn

import unitrain
from unitrain import BackendError, ConfigError, Launch, LaunchError, StrategyConfig, UsageError
from unitrain.communication.backend import load_backend
from unitrain.config import Precision
from unitrain.initialize import advice, choose_backend, default_threads
from unitrain.launch.detect import detect

RECORDED = {
    path.stem: json.loads(path.read_text())["environments"]
    for path in sorted((TESTS / "launch_environments").glob("*.json"))
}
JOBS = {name: environments[-1] for name, environments in RECORDED.items() if detect(environments[-1]).world_size > 1}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Put a launcher's variables into the environment."""

    def put(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize("name", RECORDED)
def test_auto_follows_the_launcher(name: str) -> None:
    launch = detect(RECORDED[name][0])
    chosen = choose_backend(launch, StrategyConfig())
    if launch.launcher == "python":
        assert chosen == ("data_parallel" if torch.cuda.device_count() > 1 else "single")
    elif launch.launcher == "horovodrun":
        assert chosen == "horovod"
    elif launch.launcher == "mpirun":
        assert chosen == ("horovod" if _mpi_of_horovod() == launch.mpi else "ddp")
    else:
        assert chosen == "ddp"


def _mpi_of_horovod() -> str | None:
    try:
        import horovod.torch as hvd  # noqa: TID251
    except ImportError:
        return None
    if not getattr(hvd, "mpi_built", lambda: False)():
        return None
    libraries = subprocess.run(["ldd", hvd.mpi_ops.mpi_lib.__file__], capture_output=True, text=True, check=True).stdout
    return "Open MPI 4" if "libmpi.so.40 =>" in libraries and "libopen-rte.so.40 =>" in libraries else "another"


WITHOUT_MPI = "def init(): ...\ndef mpi_built(): return False\ndef gloo_built(): return True\n"


@pytest.mark.parametrize("content", ["", WITHOUT_MPI], ids=["no extension", "no MPI"])
def test_mpirun_with_a_horovod_that_lacks_mpi_gets_ddp(tmp_path: Path, content: str) -> None:
    """A Horovod that was not built for this torch imports without its C extension; another was built without MPI."""
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "torch" / "__init__.py").write_text(content)
    assert run_ranks(_choice_under_mpirun, str(tmp_path), nprocs=1) == ["ddp"]


def _choice_under_mpirun(path: str) -> str:
    sys.path.insert(0, path)
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        del sys.modules[name]
    launch = detect(RECORDED["openmpi-4"][0])
    if "init" not in (Path(path) / "horovod" / "torch" / "__init__.py").read_text():
        with pytest.raises(BackendError, match=r"not built for torch .*unitrain install-horovod"):
            load_backend("horovod").check(StrategyConfig(), launch)
    return choose_backend(launch, StrategyConfig())


def test_alone_on_a_cpu() -> None:
    strategy = unitrain.init(device="cpu")
    assert (strategy.config.backend, strategy.rank, strategy.world_size, strategy.is_main) == ("single", 0, 1, True)
    assert (strategy.launch.local_rank, strategy.launch.local_world_size, strategy._job.node_rank) == (0, 1, 0)
    assert strategy.device == torch.device("cpu")
    assert strategy.config.backend == "single"


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("backend", ["single", "data_parallel", "horovod"])
def test_n_copies_of_a_job_are_refused(environment: Any, name: str, backend: str) -> None:
    launch = detect(JOBS[name])
    if backend == "horovod" and launch.launcher in ("mpirun", "horovodrun"):
        assert load_backend(backend).expected_world(launch) == launch.world_size
        return
    environment(JOBS[name])
    with pytest.raises(LaunchError) as raised:
        unitrain.init(backend=backend)
    said = str(raised.value)
    assert f"{launch.launcher} started {launch.world_size} processes" in said
    assert f"with backend '{backend}' each would have a world size of 1" in said
    assert f"{launch.world_size} copies of one job" in said
    assert f"Use backend auto (here: {choose_backend(launch, StrategyConfig())})" in said
    assert launch.evidence[0] in said


@pytest.mark.parametrize("close_twice", [False, True])
@on_ranks()
def test_a_process_group_of_the_script_is_adopted_and_left(close_twice: bool) -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    for name in ("UNITRAIN_LAUNCHER", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        del os.environ[name]
    for _ in range(2 if close_twice else 1):
        strategy = unitrain.init(device="cpu")
        assert strategy.all_reduce(torch.ones(())) == 2
        strategy.close()
    assert dist.is_initialized()
    assert dist.group.WORLD is group
    dist.destroy_process_group()
    assert (strategy.config.backend, strategy.launch.launcher, strategy.world_size) == ("ddp", "env", 2)


def test_one_strategy_at_a_time() -> None:
    with unitrain.init(backend="single"), pytest.raises(UsageError, match=r"call its close\(\) first"):
        unitrain.init(backend="single")
    again = unitrain.init(backend="single")
    again.close()
    again.close()
    unitrain.init(backend="single")


def test_a_refused_init_leaves_the_way_free() -> None:
    with pytest.raises(ConfigError):
        unitrain.init(backend="sinlge")
    unitrain.init(backend="single")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"compression": "fp16"}, "compression=fp16"),
        ({"ddp": {"bucket_cap_mb": 1.0}}, "ddp"),
        ({"horovod": {"controller": "gloo"}, "fsdp": {"shards": "host"}}, "fsdp, horovod"),
    ],
)
def test_settings_without_effect_warn_where_the_user_wrote_them(settings: dict[str, Any], named: str) -> None:
    with pytest.warns(UserWarning, match=f"^these settings have no effect with backend 'single': {named}.$") as warned:
        unitrain.init(backend="single", **settings)
    assert [warning.filename for warning in warned] == [__file__]


def test_settings_with_effect_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copies = {"every": 0}
        unitrain.init(backend="ddp", ddp={"bucket_cap_mb": 1.0}, clip_norm=1.0, memory_copies=copies)


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "xpu", "gpu", "auto:0", "cpu:0"])
def test_a_gpu_that_is_not_there(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{device}', but torch finds no accelerator"):
        unitrain.init(backend="single", device=device)


def test_nccl_without_a_gpu() -> None:
    with pytest.raises(
        ConfigError,
        match=r"ddp\.communication is nccl, .* does not have nccl for .* cpu .*: set it to auto, device",
    ):
        unitrain.init(backend="ddp", ddp={"communication": "nccl"})


@pytest.mark.parametrize(
    ("launcher", "world_size", "gpus", "said"),
    [
        ("torchrun", 1, 4, ["one process and 4 visible GPUs", "--nproc-per-node 4"]),
        ("python", 1, 2, ["one process and 2 visible GPUs", "torchrun --nproc-per-node 2"]),
        ("mpirun", 1, 2, []),
        ("python", 1, 1, []),
        ("torchrun", 4, 4, []),
        ("python", 1, 0, []),
    ],
)
def test_advice_on_idle_gpus(launcher: str, world_size: int, gpus: int, said: list[str]) -> None:
    line = advice(Launch(launcher, world_size=world_size), gpus)
    assert bool(line) == bool(said)
    assert all(part in line for part in said)


def _drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def _draws(precision: Precision) -> tuple[Any, ...]:
    with unitrain.init(seed=7, precision=precision) as strategy:
        before = _drawn()
        strategy.prepare(nn.Linear(1, 1))
        after = _drawn()
        strategy.prepare(nn.Linear(1, 1))
        return before, after, _drawn()


def test_seeds_are_shared_until_prepare_and_then_differ() -> None:
    """What ranks build (a model, a split) comes out equal; what they draw for their rows does not."""
    [alone] = run_ranks(_draws, "fp32", nprocs=1)
    first, second = run_ranks(_draws, "fp32")
    assert first == alone  # rank 0 goes on as one process would
    assert second[0] == first[0]
    for later in (1, 2):
        assert not set(second[later]) & set(first[later])
    assert len({*second[0], *second[1], *second[2]}) == 9


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with unitrain.init(backend="single"):
        assert torch.get_num_threads() == threads  # the launcher's, or the user's, word
    monkeypatch.delenv("OMP_NUM_THREADS")
    with unitrain.init(backend="single"):
        assert torch.get_num_threads() == default_threads(1)
    cores = os.cpu_count() or 1
    assert default_threads(1) <= cores
    assert default_threads(cores) == default_threads(10 * cores) == 1


@on_ranks()
def test_threads_are_shared_among_the_processes_of_a_host() -> None:
    os.environ.pop("OMP_NUM_THREADS", None)
    with unitrain.init():
        assert torch.get_num_threads() == default_threads(2)


def _init_after(before: str, settings: dict[str, Any]) -> None:
    """Start and end a strategy in a process where the script has set something of torch's."""
    exec(before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unitrain.init(backend="single", **settings).close()


def _determinism(before: str, settings: dict[str, Any]) -> tuple[bool, ...]:
    _init_after(before, settings)
    return (
        torch.are_deterministic_algorithms_enabled(),
        "CUBLAS_WORKSPACE_CONFIG" in os.environ,
        torch.backends.cudnn.benchmark,
    )


@pytest.mark.parametrize(
    ("before", "settings", "after"),
    [
        ("", {}, (False, False, False)),
        ("torch.backends.cudnn.benchmark = True", {}, (False, False, True)),
        ("torch.backends.cudnn.benchmark = True", {"deterministic": True}, (True, True, False)),
    ],
)
def test_determinism_and_cudnn_s_benchmark(before: str, settings: dict[str, Any], after: tuple[bool, ...]) -> None:
    assert run_ranks(_determinism, before, settings, nprocs=1) == [after]


def test_a_script_that_forgets_to_close_is_closed_at_exit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import unitrain\ns = unitrain.init(backend='ddp')\nprint('end')\n")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")
