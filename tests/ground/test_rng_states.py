"""Generator states in checkpoints, with any number of GPUs and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from needs import GPU

from unitrain import rng


def test_a_run_on_a_cpu_leaves_the_gpus_of_its_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("this makes a CUDA context")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for module, *names in (
        (torch.cuda, "get_rng_state", "set_rng_state"),
        (torch.accelerator, "current_device_index", "device_count"),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    state = rng.capture()
    assert "cuda" not in state
    rng.restore({**state, "cuda": [torch.zeros(16, dtype=torch.uint8)]})


class Gpus:
    """GPUs that have a number for a state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, states: list[int], current: int) -> None:
        self.states = states
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(states))
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor(states[device]))
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)

    def set(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = int(state)


@pytest.mark.parametrize(
    ("current", "now", "restored"),
    [
        (1, [0, 0, 0], [10, 11, 12]),
        (3, [0, 0, 0, 0], [12, 10, 0, 11]),  # the rank's own GPU comes first, whatever its number
        (0, [0, 0], [11, 12]),
        (0, [0], [11]),
    ],
)
def test_every_gpu_s_state_is_kept_and_fits_another_number_of_gpus(
    monkeypatch: pytest.MonkeyPatch, current: int, now: list[int], restored: list[int]
) -> None:
    Gpus(monkeypatch, [10, 11, 12], current=1)
    state = rng.capture()
    gpus = Gpus(monkeypatch, now, current)
    rng.restore(state)
    assert gpus.states == restored
    monkeypatch.undo()
    rng.restore(state)  # on a CPU
    Gpus(monkeypatch, [7], current=0)
    del state["cuda"]
    rng.restore(state)  # of a CPU


@pytest.mark.gpu
@GPU
def test_what_was_captured_is_drawn_again_on_every_gpu() -> None:
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]

    def on_gpus() -> list[float]:
        return [float(torch.rand((), device=device)) for device in devices]

    on_gpus()
    state = rng.capture()
    expected = on_gpus()
    rng.restore(state)
    assert on_gpus() == expected
