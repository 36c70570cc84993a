"""``unitrain.init``: makes the strategy from the settings and the environment."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from unitrain import call_site, features
from unitrain.communication.backend import Backend, load_backend
from unitrain.config import StrategyConfig
from unitrain.device import accelerator, choices
from unitrain.errors import BackendError, ConfigError, LaunchError, UsageError
from unitrain.features.keywords import StrategySettings
from unitrain.job import excepthook
from unitrain.job.job import current
from unitrain.launch.copies import mark_rank, refuse_child_of_rank, refuse_copies
from unitrain.launch.detect import Launch, detect
from unitrain.process import (
    occupy_standard_descriptors,
    print_stacks_when_killed,
    print_stderr,
    retain_freed_memory,
    usable_cores,
)
from unitrain.rng import seed_all
from unitrain.settings import resolve_strategy
from unitrain.strategy import Strategy


def init(config: StrategyConfig | None = None, **settings: Unpack[StrategySettings]) -> Strategy:
    """Detect the launcher, choose a backend, and start it.

    Args:
        config: the settings. Fields that were set explicitly take precedence over the environment (``UNITRAIN_...``).
        **settings: fields of ``StrategyConfig``; they take precedence over both.

    Returns:
        The strategy. It is closed at exit if the script does not close it.

    Raises:
        ConfigError: a setting is unknown, malformed, or not supported here.
        LaunchError: the launcher's variables are missing or wrong, or the backend would not see the launcher's world,
            or an unknown launcher seems to have started copies of this process.
        BackendError: the backend's library is missing.
        UsageError: another strategy is still open.
    """
    occupy_standard_descriptors()
    excepthook.install_hook()
    print_stacks_when_killed()
    job = current()
    if job is not None and not job.ended:
        raise UsageError("unitrain.init() was called while another strategy is open: call its close() first.")
    launch = _adopted(detect(os.environ))
    # An unknown launcher may have started several processes, and each would train the whole job alone.
    if launch.launcher == "python":
        refuse_copies()
    refuse_child_of_rank(launch)
    resolved = resolve_strategy(config, settings, os.environ)
    if resolved.backend == "auto":
        resolved = resolved.model_copy(update={"backend": choose_backend(launch, resolved)})
    backend = load_backend(resolved.backend)
    _check_world(backend, launch)
    backend.check(resolved, launch)
    _check_honoured(backend, resolved, launch)
    _check_shares(resolved, launch)
    features.check(resolved, backend)
    features.before_joining(launch, backend)
    _set_process_state(resolved, launch)
    if line := advice(launch, choices(resolved.device)):
        print_stderr(f"unitrain: {line}")
    try:
        strategy = Strategy(backend, resolved, launch)
    finally:
        # torch.distributed has put another hook over it, which holds messages back, such as a failed handshake's.
        excepthook.install_hook()
    mark_rank(launch)
    return strategy


def _adopted(launch: Launch) -> Launch:
    """Without a launcher, take rank and world size from a process group that the script has initialised."""
    if launch.launcher != "python" or not (dist.is_available() and dist.is_initialized()):
        return launch
    rank, world = dist.get_rank(), dist.get_world_size()
    # All on this host, as far as is known; on other hosts the script sets the device.
    return replace(
        launch, launcher="env", rank=rank, world_size=world, local_rank=rank, local_world_size=world,
        evidence=("torch.distributed.is_initialized()",),
    )  # fmt: skip


def choose_backend(launch: Launch, config: StrategyConfig) -> str:
    """Return the backend that ``backend="auto"`` selects under this launcher.

    horovodrun: Horovod. mpirun: Horovod if it is installed with MPI, else DDP. Any other launcher: DDP. Without a
    launcher: DataParallel if several CUDA GPUs are visible, else single.

    Args:
        launch: how this process was started.
        config: has the setting ``device``.
    """
    if launch.launcher == "horovodrun":
        return "horovod"
    if launch.launcher == "mpirun":
        return "horovod" if _horovod_has_mpi(launch) else "ddp"
    if launch.launcher != "python":
        return "ddp"
    # torch's DataParallel supports no other accelerators.
    return "data_parallel" if accelerator() == "cuda" and choices(config.device) > 1 else "single"


def advice(launch: Launch, gpus: int) -> str:
    """Return a hint for a job of one process that may use several GPUs; an empty string for others.

    Args:
        launch: how this process was started.
        gpus: how many GPUs this process may choose from.
    """
    if gpus < 2 or launch.world_size > 1 or launch.launcher not in ("torchrun", "python"):
        return ""
    command = f"torchrun --nproc-per-node {gpus} {' '.join(sys.argv) or 'SCRIPT'}"
    return f"one process and {gpus} visible GPUs: `{command}`, one process for each, is the fastest way to use them."


def _horovod_has_mpi(launch: Launch) -> bool:
    """Return whether Horovod is installed and works with this MPI."""
    if find_spec("horovod") is None:
        return False
    try:
        load_backend("horovod").check(StrategyConfig(backend="horovod"), launch)
    except (ConfigError, BackendError):
        return False
    return True


def _check_world(backend: type[Backend], launch: Launch) -> None:
    """Refuse to run N independent copies of a job."""
    seen = backend.expected_world(launch)
    if seen == launch.world_size:
        return
    raise LaunchError(
        f"{launch.launcher} started {launch.world_size} processes, but with backend {backend.name!r} each would have a "
        f"world size of {seen}, and they would train {launch.world_size} copies of one job. Use backend auto (here: "
        f"{choose_backend(launch, StrategyConfig())}), or start the script with a launcher that {backend.name!r} "
        f"works under: {backend.served_by}. Detected from {', '.join(launch.evidence)}."
    )


def _check_honoured(backend: type[Backend], config: StrategyConfig, launch: Launch) -> None:
    """Refuse a compression that this backend lacks, and warn of settings that have no effect in this run."""
    idle = []
    if config.compression not in backend.compressions:
        if launch.world_size > 1:
            raise ConfigError(
                f"compression {config.compression!r} is not supported by backend {backend.name!r}, which supports "
                f"{', '.join(backend.compressions)}."
            )
        idle.append(f"compression={config.compression}")
    idle += [name for name, value in config.sections_of_others(backend.name).items() if value != type(value)()]
    if idle:
        call_site.warn(f"these settings have no effect with backend {backend.name!r}: {', '.join(idle)}.")


def _check_shares(config: StrategyConfig, launch: Launch) -> None:
    """Refuse ``shares`` of another number of ranks."""
    if config.shares is not None and len(config.shares) != launch.world_size:
        raise ConfigError(
            f"shares is {list(config.shares)}, but this job has {launch.world_size} ranks: give one for each, or null."
        )


def _set_process_state(config: StrategyConfig, launch: Launch) -> None:
    """Set torch's process-wide state: threads, seeds, determinism."""
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it; mpirun, horovodrun and srun don't
        torch.set_num_threads(default_threads(launch.local_world_size))
    retain_freed_memory()
    seed_all(config.seed)
    if config.deterministic:
        # Without it, cuBLAS refuses deterministic algorithms.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # It would choose an algorithm by its time, and so perhaps another one in each run.
        torch.backends.cudnn.benchmark = False
    if torch.are_deterministic_algorithms_enabled() != config.deterministic:  # setting it imports torch's compiler
        torch.use_deterministic_algorithms(config.deterministic)


def default_threads(local_world_size: int) -> int:
    """Return the compute threads of each process: cores // processes, at most the cores that it may use.

    Args:
        local_world_size: the number of processes on this host.
    """
    return max(1, min(usable_cores(), (os.cpu_count() or 1) // local_world_size))
