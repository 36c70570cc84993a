"""The loop of transformers' run_clm_no_trainer.py, ported as docs/migrating/moving.md says: the same weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader

import unitrain

BLOCK, BATCH, ACCUMULATE, EPOCHS = 16, 4, 2, 2
# transformers' losses are in float32.
EXACT = 1e-7


def parts() -> tuple[list[dict[str, list[int]]], list[dict[str, list[int]]], Any, torch.optim.Optimizer, Any]:
    """Return blocks of tokens to train and to evaluate, a tiny model, and the script's optimizer and scheduler."""
    from transformers import AutoModelForCausalLM, GPT2Config, get_scheduler

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (27 * BLOCK,), generator=generator).tolist()
    blocks = [tokens[start : start + BLOCK] for start in range(0, len(tokens), BLOCK)]  # its group_texts
    rows = [{"input_ids": block, "labels": block} for block in blocks]
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=BLOCK, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = AutoModelForCausalLM.from_config(config).double()
    plain = ("bias", "layer_norm.weight")
    groups = [
        {"params": [p for name, p in model.named_parameters() if not name.endswith(plain)], "weight_decay": 0.1},
        {"params": [p for name, p in model.named_parameters() if name.endswith(plain)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    steps = EPOCHS * math.ceil(math.ceil(22 / BATCH) / ACCUMULATE)
    return rows[:22], rows[22:], model, optimizer, get_scheduler("linear", optimizer, 1, steps)


def original() -> tuple[dict[str, torch.Tensor], float]:
    """Train on one process in the order of the data, and return the weights and the perplexity."""
    from transformers import default_data_collator

    train, evaluation, model, optimizer, scheduler = parts()
    for _ in range(EPOCHS):
        model.train()
        rows = [train[i : i + BATCH * ACCUMULATE] for i in range(0, len(train), BATCH * ACCUMULATE)]
        for step in rows:  # accelerate's own weights of a short last step are not the mean over its samples
            for batch in DataLoader(step, BATCH, collate_fn=default_data_collator):  # type: ignore[arg-type]
                (model(**batch).loss * len(batch["labels"]) / len(step)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [model(**default_data_collator([row])).loss for row in evaluation]
    return model.state_dict(), math.exp(torch.stack(losses).mean())


def ported(backend: str) -> tuple[dict[str, torch.Tensor], float]:
    from transformers import default_data_collator

    train_rows, evaluation_rows, model, optimizer, scheduler = parts()
    with unitrain.init(backend=backend, device="cpu", precision="fp64", accumulate=ACCUMULATE) as strategy:
        model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
        how: Any = {"collate_fn": default_data_collator}
        train = strategy.dataloader(train_rows, global_batch_size=BATCH * ACCUMULATE, **how)
        evaluation = strategy.dataloader(evaluation_rows, global_batch_size=3, **how)
        for _ in train.epochs(EPOCHS):
            for batch in train:
                strategy.step(model(**batch).loss, optimizer, scheduler)
        losses = strategy.meter()
        with strategy.evaluation(model):
            for batch in evaluation:
                losses.add(mean=model(**batch).loss, count=len(batch["labels"]))
        return strategy.export(model).state_dict(), math.exp(losses.value())


@pytest.mark.parametrize(("backend", "nprocs"), [pytest.param("ddp", 3, marks=pytest.mark.soak), ("fsdp", 2)])
def test_run_clm_no_trainer(backend: str, nprocs: int) -> None:
    pytest.importorskip("transformers")
    [(theirs, perplexity)] = run_ranks(original, nprocs=1, timeout=120, fresh=True)
    for state, found in run_ranks(ported, backend, nprocs=nprocs, timeout=120, fresh=True):
        assert found == pytest.approx(perplexity, rel=1e-6)  # exp() of a mean of float32
        for name, value in theirs.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=EXACT)
