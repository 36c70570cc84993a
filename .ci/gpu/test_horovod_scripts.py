"""The cases of Horovod's parallel tests on two ranks that share the GPU: ours have the results of Horovod."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import horovod_cases
import pytest
import torch
from gpu_world import DEVICE, shared_gpu
from ranks import run_ranks
from test_as_horovod import OURS, REAL, ROUNDED, assert_same
from torch import Tensor, nn

MAKERS = {"arange", "empty", "eye", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"}


class OnDevice:
    """torch, for a module whose new tensors are to lie on the device, with the numbers that they have on a CPU."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return (lambda *args, **kwargs: value(*args, **kwargs).to(DEVICE)) if name in MAKERS else value


def on_cpu(value: Any) -> Any:
    """Return a result that can be sent to the process of the test."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {name: on_cpu(each) for name, each in value.items()}
    return [on_cpu(each) for each in value] if isinstance(value, list | tuple) else value


def outcomes(module: str, communication: str) -> dict[str, Any]:
    """Run all cases with a module and a communication library on this rank."""
    if DEVICE.startswith("cuda"):
        torch.cuda.set_device(DEVICE)
    net: Callable[..., nn.Module] = horovod_cases.net

    def on_device(hvd: Any, kind: Callable[[], nn.Module] = horovod_cases.Branches) -> nn.Module:
        return net(hvd, lambda: kind().to(DEVICE))

    vars(horovod_cases).update(torch=OnDevice(), net=on_device, Tensor=Tensor)
    os.environ |= {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "UNITRAIN_BACKEND": "ddp", "UNITRAIN_DEVICE": DEVICE}
    os.environ["UNITRAIN_DDP__COMMUNICATION"] = communication
    hvd = import_module(module)
    hvd.init()
    found = {}
    for name, case in horovod_cases.CASES.items():
        print(name, flush=True)  # which of them hangs
        found[name] = on_cpu(horovod_cases.outcome(case, hvd))
    hvd.shutdown()
    return found


def run(module: str, communication: str) -> list[dict[str, Any]]:
    launcher: Any = "horovodrun" if module == REAL else "spawn"
    return run_ranks(shared_gpu, outcomes, (module, communication), launcher=launcher, timeout=60)


def differences(of_ranks: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, str]:
    """Return the cases whose results differ, with what differs."""
    found: dict[str, str] = {}
    for ours, theirs in zip(of_ranks, expected, strict=True):
        for name, value in ours.items():
            try:
                assert_same(value, theirs[name], exact=name not in ROUNDED)
            except Exception as error:
                found[name] = f"{str(error)[:300]} | {str(value)[:200]} | {str(theirs[name])[:200]}"
    return found


@pytest.mark.parametrize("communication", ["auto"] if not DEVICE.startswith("cuda") else ["gloo", "nccl"])
def test_cases_on_the_gpu_have_the_results_of_horovod(communication: str) -> None:
    ours, theirs = run(OURS, communication), run(REAL, "")
    found = differences(ours, theirs)
    print(f"\n{len(ours[0])} cases by {communication}, {len(found)} of them with another result:")
    for name, how in found.items():
        print(f"{name}: {how}".replace("\n", " "))
    assert not found
