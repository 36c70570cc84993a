"""A snapshot is complete when it is returned, and shares no memory with the model."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from needs import GPU
from torch._subclasses.fake_tensor import FakeTensorMode

from unitrain.checkpoint.writer import Memory, on_host, snapshot


def test_a_snapshot_is_a_copy_and_uses_the_memory_of_the_one_before() -> None:
    state: dict[str, Any] = {
        "weight": torch.arange(3.0),
        "groups": [{"lr": 0.1, "params": [0, 1]}],
        "pair": (torch.ones(2), "text"),
    }
    memory: Memory = []
    first = snapshot(state, memory)
    state["weight"].add_(1)
    state["groups"][0]["lr"] = 0.2
    assert first["weight"].tolist() == [0, 1, 2]
    assert first["groups"] == [{"lr": 0.1, "params": [0, 1]}]
    second = snapshot({**state, "new": torch.zeros(1)}, memory)
    assert second["weight"].tolist() == [1, 2, 3]
    assert second["weight"].data_ptr() == first["weight"].data_ptr() != state["weight"].data_ptr()
    assert second["groups"][0]["lr"] == 0.2
    assert second["pair"][1] == "text"
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    other = snapshot(
        {"weight": torch.ones(4), "image": image, "tied": image.detach(), "few": image.to_sparse()}, memory
    )
    assert other["weight"].tolist() == [1, 1, 1, 1]
    assert other["image"].stride() == image.stride(), "to write them in another order takes longer"
    assert other["image"] is other["tied"]
    assert other["image"].equal(image)
    assert other["few"].to_dense().equal(image)


@pytest.mark.parametrize("sizes", [[5], [5, 3], [1, 1, 9], [9, 1, 1], [0, 0], [4] * 7])
def test_two_threads_copy_all_of_a_state(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    state = [torch.randn(size, requires_grad=True) for size in sizes]
    with ThreadPoolExecutor(1) as thread:
        copied = snapshot(state, [], thread)
    for copy, original in zip(copied, state, strict=True):
        assert copy.equal(original)
        assert not copy.requires_grad
        copy.fill_(7.0)
        assert not copy.numel() or not copy.equal(original)


def test_each_gpu_that_is_copied_from_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies run on streams of the tensors' devices, of which the current one need not be any."""
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))

    def stream(gpu: Any = None) -> Mock:
        return Mock(record_event=lambda: Mock(synchronize=lambda: waited.append(gpu)))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    first, second = torch.device("cuda", 1), torch.device("cuda", 2)
    with FakeTensorMode():  # tensors that know where they would be
        state = {"weight": torch.empty(2, device=first), "step": 3, "host": torch.ones(2)}
        snapshot(state)
        assert waited == [first]
        copied = snapshot({"nested": [state, (torch.empty(1, device=second), torch.empty(1, device=first))]})
        assert sorted(waited[1:], key=str) == [first, second]
        waited.clear()
        copies: list[Any] = []
        snapshot(state, copies=copies)
    assert copied["nested"][1][0].device.type == "cpu"
    snapshot({"weight": torch.ones(2)}, copies=copies)
    assert not waited
    assert len(copies) == 1


def test_what_is_on_a_gpu_is_copied_to_the_host_once() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight = torch.ones(4, 2, device="cuda:1")
        here = torch.ones(1)
        state = OrderedDict(weight=weight.detach(), tied=weight.view(4, 2), rows=weight[2:], nested=[here, 3])
        copied = on_host(state)
    assert {one.device.type for one in (copied["weight"], copied["rows"])} == {"cpu"}
    assert copied["weight"] is copied["tied"]
    assert copied["rows"].shape == (2, 2)
    assert copied["nested"][0] is here
    assert type(copied) is OrderedDict


@pytest.mark.gpu
@GPU
def test_a_snapshot_from_a_gpu_is_whole_though_the_gpu_is_busy() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(20):
        busy = (busy @ busy).sin()
    state = {"weight": torch.zeros(1 << 24, device=device) + 0 * busy[0, 0] + 1}
    copied = snapshot(state)
    assert copied["weight"].is_pinned()
    assert (copied["weight"] == 1).all()
