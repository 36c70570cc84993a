"""Other people's models, on ranks that have no sample of the last batch: the training is that of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import default_collate

import unitrain

GLOBAL_BATCH = 4
EPOCHS = 2


class Case(NamedTuple):
    """A model, its samples, and its loss: the mean over the samples of a batch."""

    model: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    collate: Callable[[list[Any]], Any] = default_collate
    settings: Mapping[str, Any] = {}
    samples: int = 9
    """The last batch has one sample, which is rank 0's. BatchNorm needs two."""


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


def _image(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(3, 32, 32, generator=generator), torch.randint(5, (), generator=generator)


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))


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


def _regress(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


class _Graphs(nn.Module):
    """Sums messages over edges, and nodes over their graph."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, graphs: dict[str, Tensor]) -> Tensor:
        nodes, (source, target) = graphs["nodes"], graphs["edges"]
        nodes = torch.tanh(nodes.index_add(0, target, self.message(nodes)[source]))
        pooled = nodes.new_zeros(int(graphs["graph"].max()) + 1, 4).index_add(0, graphs["graph"], nodes)
        out: Tensor = self.out(pooled)
        return out


def _graph(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    number = int(torch.randint(2, 6, (), generator=generator))
    return (
        torch.randn(number, 4, generator=generator),
        torch.randint(number, (2, 2 * number), generator=generator),
        torch.randn(1, generator=generator),
    )


def _disjoint_union(samples: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    sizes = [len(nodes) for nodes, _, _ in samples]
    starts = [0, *itertools.accumulate(sizes)]
    edges = [edges + start for (_, edges, _), start in zip(samples, starts, strict=False)]
    graph = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    nodes = torch.cat([nodes for nodes, _, _ in samples])
    targets = torch.stack([target for _, _, target in samples]).double()
    return {"nodes": nodes, "edges": torch.cat(edges, 1), "graph": graph}, targets


CASES = {
    "gpt2": Case(_gpt2, _tokens, _token_loss),
    "batch_norm": Case(_batch_norm, _image, _classify, settings={"sync_batchnorm": True}, samples=10),
    "packed_lstm": Case(_Tagger, _sequence, _regress, _packed),
    "graphs": Case(_Graphs, _graph, _regress, _disjoint_union),
}


Trained = tuple[list[float], list[Tensor], int]


def train(name: str, backend: str) -> Trained:
    """Return the losses of the epochs, the weights, and the number of stand-ins."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)
    samples = [case.sample(generator) for _ in range(case.samples)]
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=60, **case.settings) as strategy:
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


@cache
def alone(name: str) -> Trained:
    return train(name, "single")


@pytest.mark.slow("two backends train three models")
@pytest.mark.xdist_group("stand_ins")
@pytest.mark.parametrize(
    ("cases", "launcher"),
    [
        ({"ddp": [*CASES], "fsdp": [*CASES]}, "spawn"),
        pytest.param({"horovod": [*CASES]}, "horovodrun", marks=[HOROVOD, pytest.mark.soak]),
    ],
    ids=["ddp, fsdp", "horovod"],
)
def test_an_uneven_end_trains_like_one_process(
    cases: dict[str, list[str]], launcher: Literal["spawn", "horovodrun"]
) -> None:
    ranks = run_ranks(train_all, cases, nprocs=3, launcher=launcher, timeout=200)
    for backend, name in ((backend, name) for backend, names in cases.items() for name in names):
        losses, weights, _ = alone(name)
        for rank, of_rank in enumerate(ranks):
            found = of_rank[backend]
            assert found[name][2] == (EPOCHS if rank >= CASES[name].samples % GLOBAL_BATCH else 0), name
            assert found[name][0] == pytest.approx(losses, rel=0, abs=1e-9), name
            for ours, theirs in zip(found[name][1], weights, strict=True):
                assert float((ours - theirs).abs().max()) < 1e-9, name


def train_all(cases: dict[str, list[str]]) -> dict[str, dict[str, Trained]]:
    """Train every case in one start of the processes, since importing the libraries takes longer than training."""
    return {backend: {name: train(name, backend) for name in names} for backend, names in cases.items()}
