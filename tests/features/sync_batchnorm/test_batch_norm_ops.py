"""Synchronised BatchNorm as operators that ``torch.compile`` and export can trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gpu_waits import GPU_0, Waits, communicator_on_gpu
from needs import HOROVOD
from ranks import run_ranks
from torch import Tensor, nn

import unitrain
from unitrain.data.loop import CurrentBatch
from unitrain.features.sync_batchnorm import layers as batch_norm
from unitrain.features.sync_batchnorm.ops import LayerContext, gather_statistics

CHANNELS = 3


def _batch(rows: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, CHANNELS, 4, 5, generator=generator, dtype=torch.float64)


def _compiled() -> None:
    """One graph, with the eager layer's bits; its stand-ins, copies, exports and refusals."""
    with unitrain.init(precision="fp64", sync_batchnorm=True, timeout_s=30) as strategy:
        plain = nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.BatchNorm2d(CHANNELS, momentum=None))
        plain.double()
        eager, current_batch = copy.deepcopy(plain), strategy._step.batches.current_batch
        for model in (plain, eager):
            batch_norm.synchronise(model, strategy.communicator, current_batch)
        compiled: Any = torch.compile(plain, backend="aot_eager", fullgraph=True)
        for step in range(4):
            current_batch.is_stand_in = strategy.rank == 1 and step == 2  # between steps of the same graph
            both = []
            for model in (compiled, eager):
                x = _batch(3, 7 * step + strategy.rank).requires_grad_()
                output = model(x)
                output.backward(_batch(3, 40 + step))
                both.append([output, x.grad, *(p.grad for p in model.parameters()), *model.buffers()])
            assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))
        current_batch.is_stand_in = False
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        explained = torch._dynamo.explain(plain)(x)
        assert explained.graph_break_count == 0
        assert explained.graph_count == 1
        torch._dynamo.reset()
        for copied in (copy.deepcopy(plain), torch.export.export(plain, (x.detach(),)).module()):
            torch.testing.assert_close(copied(x), plain(x), rtol=0, atol=0)
        with pytest.raises(RuntimeError, match=r"batch_norm_backward.* no autograd formula was registered"):
            _penalty(torch.compile(plain, backend="eager"))
        exported = strategy.export(plain)
        batch = torch.export.Dim("batch")
        traced = torch.export.export(exported, (x.detach(),), dynamic_shapes=({0: batch},)).module()
        torch.testing.assert_close(traced(_batch(5, 0)), exported(_batch(5, 0)))


def _penalty(model: Any) -> None:
    x = _batch(4, 0).requires_grad_()
    [gradient] = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.all("test_compile.py compiles such layers on two ranks")
@pytest.mark.parametrize("launcher", ["spawn", pytest.param("horovodrun", marks=[HOROVOD, pytest.mark.soak])])
def test_compiled_and_exported_without_graph_breaks(launcher: Any) -> None:
    run_ranks(_compiled, launcher=launcher)


def test_no_layer_waits_for_a_gpu() -> None:
    with Waits() as waits:
        ranks = LayerContext(communicator_on_gpu(), CurrentBatch())
        assert gather_statistics(torch.ones(2, CHANNELS, device=GPU_0), ranks, "layer").mean.device == GPU_0
    assert waits.found == []
