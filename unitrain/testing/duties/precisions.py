"""Duties of training in fp32, bf16 and fp16."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss
from torch.optim import SGD

from unitrain.testing.duty import duty
from unitrain.testing.models import SAMPLES, Net, assert_bit_equal_on_all_ranks, flat, samples
from unitrain.testing.worlds import World

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@duty(each={name: name for name in _DTYPES})
def learns_in_precision(world: World, precision: str) -> None:
    """The loss falls, and ranks stay bit-equal; if the gradient of one overflows in fp16, all skip that step."""
    with world.open(precision=precision) as strategy:
        model = Net().float()
        prepared, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.05))
        losses, skipped = [], []
        for step in range(8):
            for inputs, targets in strategy.dataloader(samples(), global_batch_size=SAMPLES):
                with strategy.autocast():
                    out = prepared(inputs.float())
                    assert out.dtype == _DTYPES[precision]
                    loss = mse_loss(out.float(), targets.float())
                losses.append(loss.item())
                overflows = precision == "fp16" and step == 3 and strategy.rank == strategy.world_size - 1
                before = flat(model)
                result = strategy.step(loss * 1e36 if overflows else loss, optimizer)
                assert result.stepped != torch.equal(flat(model), before)
                skipped.append(result.skipped)
        assert skipped == [precision == "fp16" and step == 3 for step in range(8)]
        assert losses[-1] < losses[0]
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert_bit_equal_on_all_ranks(strategy, model)
