"""What people do with models under the backend fsdp: adapters on frozen weights, compiled blocks, parts of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset

import unitrain

EXACT = 1e-9
WORDS, LENGTH = 32, 6
State = dict[str, Tensor]


def texts() -> TensorDataset:
    return TensorDataset(torch.randint(3, WORDS, (10, LENGTH), generator=torch.Generator().manual_seed(4)))


def loss_of(model: Any, words: Tensor) -> Tensor:
    return cross_entropy(model(words).logits.flatten(0, 1), words.flatten())


def gpt2(**more: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 2, "n_head": 2}
    off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, **more))


def adapted() -> tuple[nn.Module, Optimizer]:
    """Return a model with LoRA, by peft: frozen weights, and trained ones beside them."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))
    return model, AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02)


def compiled_blocks() -> tuple[nn.Module, Optimizer]:
    """Return a model whose blocks the script has compiled itself."""
    model = gpt2()
    for i, block in enumerate(model.transformer.h):
        model.transformer.h[i] = torch.compile(block, backend="eager")
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def checkpointed() -> tuple[nn.Module, Optimizer]:
    """Return a model that computes its blocks again in the backward, in transformers' own way."""
    model = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, SGD(model.parameters(), lr=0.1)


Made = Callable[[], tuple[nn.Module, Optimizer]]
CASES: list[Made] = [adapted, compiled_blocks, checkpointed]


def train(backend: str, make: Made) -> tuple[list[float], State]:
    """Return the losses, and the weights of an exported copy."""
    with unitrain.init(backend=backend, precision="fp64", clip_norm=0.5, device="cpu", timeout_s=60) as strategy:
        model, optimizer = make()
        model, optimizer = strategy.prepare(model.train(), optimizer)
        loader = strategy.dataloader(texts(), global_batch_size=4)
        losses = []
        for _ in loader.epochs(2):
            mean = strategy.meter()
            for (words,) in loader:
                loss = loss_of(model, words)
                mean.add(mean=loss, count=len(words))
                strategy.step(loss, optimizer)
            losses.append(mean.value())
        return losses, strategy.export(model).state_dict()


def train_all(backend: str) -> list[tuple[list[float], State]]:
    return [train(backend, make) for make in CASES]


@pytest.mark.all("three language models, compiled and trained twice")
def test_adapters_and_compiled_blocks_train_as_in_one_process() -> None:
    pytest.importorskip("peft")
    ranks = run_ranks(train_all, "fsdp", timeout=120)
    (alone,) = run_ranks(train_all, "single", nprocs=1, timeout=120)
    for i, (make, (losses, weights)) in enumerate(zip(CASES, alone, strict=True)):
        assert losses[1] < losses[0]
        for found in ranks:
            assert found[i][0] == pytest.approx(losses, abs=EXACT), make.__name__
            assert list(found[i][1]) == list(weights), make.__name__
            for name, weight in weights.items():
                torch.testing.assert_close(found[i][1][name], weight, rtol=0, atol=EXACT, msg=f"{make.__name__} {name}")
