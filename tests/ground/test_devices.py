"""Accelerators of any type that torch has, with made-up ones; tests/simulated_device trains on one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from free_ports import free_port
from needs import HOROVOD
from places import TESTS
from torch import nn

import unitrain
from unitrain import device as devices
from unitrain.communication.backend import load_backend
from unitrain.config import StrategyConfig
from unitrain.device import accelerator, choices, device_type, pick_device, precise
from unitrain.errors import BackendError, ConfigError, LaunchError
from unitrain.initialize import choose_backend
from unitrain.launch.detect import Launch
from unitrain.module_copy import move_foreign
from unitrain.training.models.precision import check_precision

ddp_devices: Any = import_module("unitrain.backends.process_group.devices")
CPU = torch.device("cpu")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives this process accelerators of a type."""

    def has(kind: str, count: int) -> list[int]:
        chosen: list[int] = []
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
        monkeypatch.setattr(devices, "precise", lambda device: CPU if device.type == "mps" else device)
        return chosen

    return has


@pytest.mark.parametrize("kind", ["cuda", "xpu", "hpu", "mtia"])
def test_each_local_rank_has_a_device_of_the_type_that_is_there(kind: str, host: Any) -> None:
    chosen = host(kind, 2)
    assert accelerator() == kind
    for setting in ("auto", kind):
        launch = Launch("torchrun", rank=1, world_size=2, local_rank=1, local_world_size=2)
        assert pick_device(setting, launch) == torch.device(kind, 1)
        assert choices(setting) == 2
    assert pick_device(f"{kind}:0", Launch("python")) == torch.device(kind, 0)
    assert chosen == [1, 1, 0]
    assert (choices(f"{kind}:0"), choices("cpu")) == (1, 0)
    assert device_type("cpu") == "cpu"
    with pytest.raises(ConfigError, match=f"only {kind}:0 to {kind}:1 are visible"):
        pick_device(f"{kind}:2", Launch("python"))
    with pytest.raises(ConfigError, match=f"device is 'mps', but torch finds devices of type {kind} only"):
        pick_device("mps", Launch("python"))


@pytest.mark.parametrize("mask", ["CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES"])
def test_a_launcher_may_show_each_process_one_device(mask: str, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host("xpu", 1)
    for name in devices._MASKS:
        monkeypatch.delenv(name, raising=False)
    launch = Launch("srun", rank=1, world_size=2, local_rank=1, local_world_size=2)
    with pytest.raises(LaunchError, match=r"local rank 1 has no device: .* 1 visible devices of type xpu"):
        pick_device("auto", launch)
    monkeypatch.setenv(mask, "3")
    assert pick_device("auto", launch) == torch.device("xpu", 0)


def test_a_device_without_float64_serves_one_process_and_float32(host: Any) -> None:
    assert (precise(CPU), precise(torch.device("meta"))) == (CPU, CPU)  # meta computes nothing at all
    host("mps", 1)
    assert pick_device("auto", Launch("python")) == torch.device("mps", 0)
    with pytest.raises(ConfigError, match=r"mps has no float64, .* train in one process, or on device cpu"):
        pick_device("auto", Launch("torchrun", world_size=2))
    with pytest.raises(ConfigError, match="precision is fp64, which meta lacks"):
        check_precision("fp64", torch.device("meta"))


def test_auto_takes_one_device_where_data_parallel_supports_none(host: Any) -> None:
    for kind, chosen in (("cuda", "data_parallel"), ("xpu", "single"), ("mps", "single")):
        host(kind, 2)
        assert choose_backend(Launch("python"), StrategyConfig()) == chosen
        assert choose_backend(Launch("python"), StrategyConfig(device=f"{kind}:1")) == "single"
    host("xpu", 2)
    with pytest.raises(ConfigError, match="DataParallel supports CUDA only, and device is 'auto', of which"):
        load_backend("data_parallel").check(StrategyConfig(), Launch("python"))


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_a_library_is_one_that_torch_has_for_the_device(
    backend: str, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(library: str = "auto", device: str = "auto") -> None:
        config: Any = unitrain.StrategyConfig.model_validate({"device": device, backend: {"communication": library}})
        load_backend(backend).check(config, Launch("torchrun", world_size=2))

    host("xpu", 2)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in ("gloo", "xccl", "fake"))
    check()
    check("xccl")
    check("gloo", device="cpu")
    for library in ("gloo", "nccl", "fake", "unheard_of"):
        with pytest.raises(ConfigError, match=rf"^{backend}\.communication is {library}, .* xpu .* device to cpu"):
            check(library)
    host("mps", 1)
    with pytest.raises(ConfigError, match=r"does not have gloo for devices of type mps .*: .* or use backend single"):
        check()
    host("mtia", 1)
    with pytest.raises(ConfigError, match=r"does not have a library for devices of type mtia"):
        check()


def test_errors_of_the_library_in_use_are_the_engine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = load_backend("ddp")
    assert ddp.is_engine_error(RuntimeError("[../third_party/gloo/pair.cc] Connection closed by peer"))
    assert not ddp.is_engine_error(RuntimeError("HcclAllreduce: error code is 7"))
    with monkeypatch.context() as patched:
        patched.setattr(dist, "is_initialized", lambda: True)
        patched.setattr(dist, "get_backend_config", lambda: "cpu:gloo,npu:hccl")
        assert ddp.is_engine_error(RuntimeError("HcclAllreduce: error code is 7"))
        patched.setattr(dist, "get_backend_config", lambda: "cpu:mpi")
        assert not ddp.is_engine_error(RuntimeError("could not compile the model"))


def test_devices_without_a_pci_address_are_told_by_uuid_or_index(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(uuid=f"uuid-{device.index // 2}"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    ids = [ddp_devices.gpu_id(torch.device("xpu", i), 0) for i in range(3)]
    assert ids[0] == ids[1] != ids[2]
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    ids = [ddp_devices.gpu_id(torch.device("xpu", i), 0) for i in (0, 0, 1)]
    assert ids[0] == ids[1] != ids[2]


def test_parameters_stay_the_same_objects_on_a_device_with_tensors_of_another_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a plug-in, where ``Module.to`` makes new parameters. The CPU stands for such a device."""
    module = nn.BatchNorm1d(2)
    weight, values = module.weight, module.weight.detach().clone()
    seen: list[float] = []
    weight.register_hook(lambda gradient: seen.append(float(gradient.sum())))  # type: ignore[no-untyped-call]
    weight.mark = "kept"  # type: ignore[attr-defined]
    memory = weight.data_ptr()
    move_foreign(module.parameters(), CPU)
    assert weight.data_ptr() == memory
    monkeypatch.setattr("unitrain.module_copy._is_alike", lambda *_: False)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor.clone())
    move_foreign([*module.parameters(), *module.buffers()], CPU)
    assert module.weight is weight
    assert weight.data_ptr() != memory
    assert (type(weight), weight.mark) == (nn.Parameter, "kept")  # type: ignore[attr-defined]
    assert torch.equal(weight, values)
    module(torch.randn(4, 2)).square().sum().backward()
    assert len(seen) == 1


@pytest.mark.soak
def test_training_and_checkpoints_need_nothing_that_only_linux_has(tmp_path: Path) -> None:
    """In one process, and resumed on two ranks."""
    program = [sys.executable, str(TESTS / "programs" / "without_linux.py"), str(tmp_path)]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [job | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(2)]
    for environments, said in (([{}], "single 1 resumed False"), (ranks, "ddp 2 resumed True")):
        started = [
            subprocess.Popen(program, env={**os.environ, **extra}, stdout=-1, stderr=subprocess.STDOUT, text=True)
            for extra in environments
        ]
        outputs = [process.communicate(timeout=200)[0] for process in started]
        assert [process.returncode for process in started] == [0] * len(environments), outputs
        assert said in outputs[0]


@HOROVOD
def test_a_horovod_for_cpus_is_refused_on_a_gpu(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would copy without waiting for the GPU, and throw in a thread of its own: a hang in init."""
    host("cuda", 1)
    monkeypatch.setattr("horovod.torch.nccl_built", lambda: False)
    launch = Launch("horovodrun", world_size=2, local_world_size=2)
    with pytest.raises(BackendError, match=r"was built for CPUs only.*install-horovod --gpu nccl"):
        load_backend("horovod").check(StrategyConfig(backend="horovod", device="cuda"), launch)
