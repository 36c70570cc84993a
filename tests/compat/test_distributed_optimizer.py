"""``DistributedOptimizer``, and elastic state, where Horovod's own tests have no case: beside plain loops."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import unitrain.compat.horovod as hvd
from unitrain.errors import UsageError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss_of(model: nn.Module, number: int) -> Tensor:
    """Return the loss of a batch of 8 samples."""
    samples = torch.randn(8, 7, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return F.mse_loss(model(samples[:, :4]), samples[:, 4:])


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@on_ranks()
def test_a_closure_reduces_its_gradients_itself() -> None:
    hvd.init()
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.synchronize()
        return loss

    with pytest.raises(UsageError, match="skip_synchronize"):
        optimizer.step(closure)
    with optimizer.skip_synchronize():
        optimizer.step(closure)
    same = hvd.allgather(weights(model)[None])
    assert torch.equal(same[0], same[1])
    hvd.shutdown()


@on_ranks()
def test_what_is_trained_may_change_and_differ_between_ranks() -> None:
    """Collectives between backward and step don't meet buckets that only one rank has sent."""
    hvd.init()
    first, second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    model = nn.ModuleList([first, second])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    optimizer.load_state_dict(optimizer.state_dict())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(6):
        second.requires_grad_(step not in (2, 3))
        optimizer.zero_grad()
        x = torch.full((2, 3), hvd.rank() + 1.0, dtype=torch.float64)
        (first(x).sum() + (second(x).sum() if hvd.rank() else 0)).backward()
        hvd.allreduce(torch.ones(2))
        optimizer.step()
        gradients: list[Any] = [first.bias.grad, second.bias.grad]
        assert gradients[0][0] == 2
        assert gradients[1] is None if step in (2, 3) else gradients[1][0] == 1
    assert len(called) == 6
    same = hvd.allgather(weights(model)[None])
    assert torch.equal(same[0], same[1])
    del optimizer
    gc.collect()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(2):  # the hooks of the one before do nothing
        optimizer.zero_grad()
        first(x).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(UsageError, match="new, or were frozen"):
        optimizer.step()
    hvd.shutdown()


@on_ranks()
def test_a_rank_without_batches_joins_and_another_call_is_named() -> None:
    hvd.init()
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for number in range(2 if hvd.rank() else 4):
        optimizer.zero_grad()
        loss_of(model, number).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert hvd.join() == 0
    optimizer.zero_grad()
    call: Callable[[], Any] = optimizer.step if hvd.rank() == 0 else lambda: hvd.allreduce(torch.ones(2), name="x")
    with pytest.raises(
        hvd.HorovodInternalError, match=r"'DistributedOptimizer\.noname\.0' \(\) on rank 0; 'allreduce\.x'"
    ):
        call()
    other = nn.Linear(3 + hvd.rank(), 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other.named_parameters())
    with pytest.raises(hvd.HorovodInternalError, match=r"tensor weight is float32\[2, 3\] on rank 0; float32\[2, 4\]"):
        optimizer.step()
    hvd.shutdown()


def elastic(folder: str, fail_at: int) -> tuple[list[tuple[int, int]], list[int], Tensor]:
    """Train two epochs of 12 samples, and return which samples this rank has had in this start, resets and weights."""
    os.environ |= {"UNITRAIN_ELASTIC_FOLDER": folder, "UNITRAIN_MEMORY_COPIES__EVERY": "1"}
    hvd.init()
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(12))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    had: list[tuple[int, int]] = []
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < 2:
            for index in sampler:
                optimizer.zero_grad()
                loss_of(model, index).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if len(had) == fail_at:
                    raise OSError("disk")
                had.append((state.epoch, index))
                sampler.record_batch(0, 1)
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    hvd.shutdown()
    return had, resets, weights(model)


def test_what_is_committed_comes_back_on_another_number_of_ranks(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk"):
        run_ranks(elastic, str(tmp_path), 3, fresh=True)
    ranks = run_ranks(elastic, str(tmp_path), -1, nprocs=3, fresh=True)
    had = sorted(sample for samples, *_ in ranks for sample in samples)
    assert [epoch for epoch, _ in had] == [0] * 6 + [1] * 12  # 6 were had before
    assert [index for epoch, index in had if epoch] == list(range(12))
    assert all(resets == [3] and torch.equal(model, ranks[0][2]) for _, resets, model in ranks)
