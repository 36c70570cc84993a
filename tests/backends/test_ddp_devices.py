"""Detection of ranks that share a GPU, with real stores and made-up device names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
import torch
from needs import GPU
from torch.distributed import TCPStore

ddp_devices: Any = import_module("unitrain.backends.process_group.devices")


@pytest.mark.parametrize(
    ("devices", "shared"),
    [(["a", "b", "c"], False), (["a", "b", "a"], True), (["a"], False), (["a", "a", "a", "a"], True)],
)
def test_ranks_agree_on_whether_they_share_a_device(
    devices: list[str], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddp_devices, "_starts", iter([0] * len(devices)))  # one of each rank's own process
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))

    def rank(own: str) -> bool:
        store = TCPStore("127.0.0.1", master.port, is_master=False, timeout=timedelta(seconds=20))
        return bool(ddp_devices.any_shared(store, own, len(devices)))

    with ThreadPoolExecutor(len(devices)) as ranks:
        assert list(ranks.map(rank, devices)) == [shared] * len(devices)


@pytest.mark.gpu
@GPU
def test_ranks_on_one_gpu_share_it_unless_nccl_was_told_to_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert ddp_devices.gpu_id(gpu, 0) == ddp_devices.gpu_id(gpu, 1)
    for i in range(1, torch.cuda.device_count()):
        assert ddp_devices.gpu_id(torch.device("cuda", i), 0) != ddp_devices.gpu_id(gpu, 0)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert ddp_devices.gpu_id(gpu, 0) != ddp_devices.gpu_id(gpu, 1)
