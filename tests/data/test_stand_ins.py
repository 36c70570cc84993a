"""Models that others made or changed, on ranks that have no sample of the last batch: they train as on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import default_collate

import unitrain

SAMPLES, GLOBAL_BATCH, EPOCHS = 9, 4, 2  # the last batch has one sample, which is rank 0's


class Case(NamedTuple):
    """A model, its samples, and its loss: the mean over the samples of a batch."""

    model: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    collate: Callable[[list[Any]], Any] = default_collate


def _tokens(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, 32, (6,), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss in float64: that of transformers' own language models is computed in float32."""
    logits = model(**batch).logits
    return cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off))


def _adapted() -> Any:
    """Return a model with LoRA, by peft: frozen weights, and trained ones beside them."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(_gpt2(), LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))


def _compiled_blocks() -> Any:
    """Return a model whose blocks the script has compiled itself."""
    model = _gpt2()
    for i, block in enumerate(model.transformer.h):
        model.transformer.h[i] = torch.compile(block, backend="eager")
    return model


def _checkpointed() -> Any:
    """Return a model that computes its blocks again in the backward, in transformers' own way."""
    model = _gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.out = nn.Linear(6, 1)

    def forward(self, sequences: PackedSequence) -> Tensor:
        _, (hidden, _) = self.lstm(sequences)
        out: Tensor = self.out(hidden[-1])
        return out


def _sequence(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    length = int(torch.randint(1, 6, (), generator=generator))
    return torch.randn(length, 4, generator=generator, dtype=torch.float64), torch.randn(1, generator=generator)


def _packed(samples: list[Any]) -> tuple[PackedSequence, Tensor]:
    sequences, targets = zip(*samples, strict=True)
    return pack_sequence(list(sequences), enforce_sorted=False), torch.stack(list(targets)).double()


def _regress(model: nn.Module, batch: tuple[PackedSequence, Tensor]) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


CASES = {
    "gpt2": Case(_gpt2, _tokens, _token_loss),
    "packed_lstm": Case(_Tagger, _sequence, _regress, _packed),
    "adapted": Case(_adapted, _tokens, _token_loss),
    "compiled_blocks": Case(_compiled_blocks, _tokens, _token_loss),
    "checkpointed": Case(_checkpointed, _tokens, _token_loss),
}
PLAIN, CHANGED = ["gpt2", "packed_lstm"], ["adapted", "compiled_blocks", "checkpointed"]
Trained = tuple[list[float], list[Tensor], int]


def train(name: str, backend: str) -> Trained:
    """Return the losses of the epochs, the weights, and the number of stand-ins."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)
    samples = [case.sample(generator) for _ in range(SAMPLES)]
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=60) as strategy:
        torch.manual_seed(1)
        model = case.model()
        model, optimizer = strategy.prepare(model.train(), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        loader = strategy.dataloader(samples, global_batch_size=GLOBAL_BATCH, collate_fn=case.collate)
        losses, stand_ins = [], 0
        for _ in range(EPOCHS):
            meter = strategy.meter()
            for batch in loader:
                loss = case.loss(model, batch)
                strategy.step(loss, optimizer)
                micro_batch = strategy._step.batches.micro_batch
                assert micro_batch is not None
                meter.add(mean=loss, count=max(1, micro_batch.count))
                stand_ins += loader.stand_in
            losses.append(meter.value())
        state = [strategy.full_tensor(t.detach()).double() for t in strategy.unwrap(model).state_dict().values()]
        return losses, state, stand_ins


def train_all(backend: str, names: list[str]) -> list[Trained]:
    return [train(name, backend) for name in names]


@pytest.mark.slow("trains a language model")
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("ddp", PLAIN),
        ("fsdp", PLAIN),
        pytest.param("fsdp", CHANGED, marks=pytest.mark.all("three more language models")),
        pytest.param("horovod", PLAIN, marks=[HOROVOD, pytest.mark.soak]),
    ],
)
def test_an_uneven_end_trains_like_one_process(backend: str, names: list[str]) -> None:
    if "adapted" in names:
        pytest.importorskip("peft")
    [alone] = run_ranks(train_all, "single", names, nprocs=1, timeout=200)
    for rank, results in enumerate(run_ranks(train_all, backend, names, nprocs=3, timeout=200)):
        for name, found, expected in zip(names, results, alone, strict=True):
            assert found[2] == (EPOCHS if rank else 0), name
            assert found[0] == pytest.approx(expected[0], rel=0, abs=1e-9), name
            for ours, theirs in zip(found[1], expected[1], strict=True):
                assert float((ours - theirs).abs().max()) < 1e-9, name
