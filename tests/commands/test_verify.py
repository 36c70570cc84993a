"""``unitrain verify`` passes on every installed backend, and it can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from needs import FSDP, GPU
from places import TESTS

from unitrain.commands import verify as command
from unitrain.commands.verify import find_worlds, verify, works
from unitrain.communication.backend import backend_names
from unitrain.launch.local.launchers import launch_environment
from unitrain.testing.parity.cases import CASES
from unitrain.testing.worlds import World


def run_verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unitrain.commands.cli", "verify", *arguments],
        env=launch_environment(),
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )


@pytest.fixture
def three_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``verify`` train three cases. test_conformance.py trains all, in worlds that cost less."""
    monkeypatch.setattr(command, "CASES", [case for case in CASES if case.name in ("plain", "sync_batchnorm", "bf16")])


@pytest.mark.launcher
@pytest.mark.usefixtures("forked", "three_cases")
@pytest.mark.timeout(600)
def test_a_backend_trains_as_the_plain_loop_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNITRAIN_ACCUMULATE", "3")  # not for the worlds
    for launcher in command._SIZES:
        monkeypatch.setitem(command._SIZES, launcher, {"torchrun": (3,), "mpirun": (2,)}.get(launcher, ()))
    assert verify(backend="ddp") == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert "6 of 6 trained the same as the plain loop" in printed
    assert worlds_in(printed) == {("torchrun x3", "ddp"), ("mpirun x2", "ddp")}


@pytest.mark.soak
@pytest.mark.launcher
@pytest.mark.timeout(600)
def test_all_backends_train_as_the_plain_loop_does() -> None:
    done = run_verify()
    assert done.returncode == 0, done.stdout + done.stderr
    total = len(CASES) * len(find_worlds(backend_names()))
    assert f"{total} of {total} trained the same" in done.stdout
    tried = worlds_in(done.stdout)
    for backend in ("ddp", "fsdp"):
        if any(name == backend for _, name in tried):
            assert {("torchrun x2", backend), ("torchrun x3", backend), ("mpirun x3", backend)} <= tried
    if any(name == "horovod" for _, name in tried):
        assert {("mpirun x2", "horovod"), ("mpirun x3", "horovod"), ("horovodrun x2", "horovod")} <= tried


def worlds_in(printed: str) -> set[tuple[str, str]]:
    """Return the worlds and backends of the printed table."""
    return set(re.findall(r"^(\w+ x\d+) +(\w+) .* \d+/\d+$", printed, re.MULTILINE))


@pytest.mark.launcher
@pytest.mark.usefixtures("forked")
def test_a_backend_that_trains_another_model_is_found_out(
    three_cases: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = TESTS / "plugin"
    for folder in (plugin, plugin / "wrong"):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{plugin}:{plugin / 'wrong'}")
    assert verify(backend="drops_a_rank_of_gradients") == 1
    assert "plain: loss" in " ".join(capsys.readouterr().out.split())


class Interrupted(World):
    """A world in which the user presses Ctrl-C."""

    def run(self, *_: Any, **__: Any) -> list[Any]:
        raise KeyboardInterrupt


def test_what_was_seen_before_an_interruption_is_printed(
    three_cases: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worlds = [World("single", 1, "python"), Interrupted("ddp", 1, "python")]
    monkeypatch.setattr(command, "find_worlds", lambda *_: worlds)
    with pytest.raises(KeyboardInterrupt):
        verify()
    assert worlds_in(capsys.readouterr().out) == {("python x1", "single")}


def test_what_a_backend_refuses_is_left_out() -> None:
    world = World("ddp", 2, "torchrun")
    assert works(world, "cpu", {"compile": True})
    assert not works(world, "cpu", {"compile": True, "ddp": {"bucket_cap_mb": 0.5}})


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("backend", ["single", "data_parallel", "ddp", pytest.param("fsdp", marks=FSDP)])
def test_backends_pass_on_a_gpu_that_the_ranks_share(backend: str) -> None:
    assert verify(backend=backend, device="cuda:0") == 0


@pytest.mark.gpu
@GPU
@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA GPUs, and pytest -m gpu to see them")
def test_backends_pass_on_gpus_of_their_own() -> None:
    assert verify(device="cuda") == 0
