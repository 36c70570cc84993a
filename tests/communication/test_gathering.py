"""``strategy.gather``: the rows of all ranks, and the gradients that flow back to them, are those of one process."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from needs import FSDP, HOROVOD
from ranks import run_ranks
from streams import Numbers, Shards
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import unitrain
from unitrain import Strategy, UsageError

Scores = namedtuple("Scores", "scores labels")


class Words(list[str]):
    def __init__(self, words: Any, language: str) -> None:
        super().__init__(words)
        self.language = language


WORLDS = [
    pytest.param("ddp", 2, id="ddp-2"),
    pytest.param("ddp", 3, id="ddp-3"),
    pytest.param("horovod", 2, id="horovod-2", marks=HOROVOD),
]


def structures(strategy: Strategy) -> list[Any]:
    """Gather unequal rows in structures: rank r has r of them."""
    rank = strategy.rank
    return [
        strategy.gather(torch.full((rank, 2), rank)),
        strategy.gather(Scores(torch.arange(float(rank)), {"rows": torch.full((rank + 1,), rank).bool()})),
        strategy.gather({"names": [f"{rank}.{i}" for i in range(rank)], "rank": rank, "loss": torch.tensor(rank)}),
        strategy.gather([{"boxes": torch.full((i, 4), float(rank))} for i in range(rank + 1)]),
        strategy.gather((torch.zeros(0, 3, dtype=torch.bfloat16), [])),
        strategy.gather(torch.view_as_complex(torch.full((rank, 2), float(rank)))),
        strategy.gather(UserDict(rows=torch.full((rank,), rank), words=Words([str(rank)] * rank, "en"))),
    ]


def check_structures(gathered: list[Any], ranks: int) -> None:
    rows, scores, mixed, images, (none, nothing), imaginary, of_class = gathered
    assert rows.tolist() == [[r, r] for r in range(ranks) for _ in range(r)]
    assert type(scores) is Scores
    assert scores.scores.tolist() == [float(i) for r in range(ranks) for i in range(r)]
    assert scores.labels["rows"].tolist() == [bool(r) for r in range(ranks) for _ in range(r + 1)]
    assert mixed["names"] == [f"{r}.{i}" for r in range(ranks) for i in range(r)]
    assert mixed["rank"] == mixed["loss"].tolist() == list(range(ranks))
    assert [tuple(image["boxes"].shape) for image in images] == [(i, 4) for r in range(ranks) for i in range(r + 1)]
    assert none.shape == (0, 3)
    assert none.dtype == torch.bfloat16
    assert nothing == []
    assert imaginary.tolist() == [complex(r, r) for r in range(ranks) for _ in range(r)]
    assert type(of_class) is UserDict
    assert of_class["rows"].tolist() == [r for r in range(ranks) for _ in range(r)]
    assert type(of_class["words"]) is Words
    assert of_class["words"] == [str(r) for r in range(ranks) for _ in range(r)]
    assert of_class["words"].language == "en"


def evaluations(strategy: Strategy) -> list[list[float]]:
    """Gather each batch of loops in which some batches don't reach every rank, and a value after each loop."""
    values = torch.arange(10.0)
    model = strategy.prepare(nn.Linear(1, 1))
    results = []
    loaders = [
        strategy.dataloader(values, global_batch_size=4),  # on three ranks, one has nothing of the last two samples
        strategy.dataloader(values, batch_sampler=[[0, 1, 2, 3], [4], [5, 6, 7, 8], [9]]),
        strategy.dataloader(Shards([9, 6, 3]), global_batch_size=6),
    ]
    for loader in loaders:
        with strategy.evaluation(model):
            seen = [strategy.gather({"value": batch, "name": [str(v) for v in batch.tolist()]}) for batch in loader]
        if loader is loaders[-1]:
            with pytest.raises(UsageError, match="the order of a Shards over the ranks is not known"):
                strategy.gather(seen, in_order=loader)
        together = strategy.gather(torch.tensor([-1.0]))
        assert together.tolist() == [-1.0] * strategy.world_size
        assert [name for part in seen for name in part["name"]] == [
            str(v) for part in seen for v in part["value"].tolist()
        ]
        results.append(torch.cat([part["value"] for part in seen]).tolist())
    first, second = (strategy.dataloader(values, global_batch_size=4) for _ in range(2))
    with strategy.evaluation(model):
        pairs = [strategy.gather((one, other, one + other)) for one, other in zip(first, second, strict=False)]
        for batch in first:  # left early, on all ranks
            strategy.gather(batch)
            break
    results.append(torch.cat([both for _, _, both in pairs]).tolist())
    assert strategy.gather(torch.tensor(1)).tolist() == [1] * strategy.world_size
    return results


class TwoTowers(nn.Module):
    """Embeds both halves of a pair."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        for parameter in self.parameters():
            if parameter.dim():
                parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, right = pairs.unbind(1)
        return normalize(torch.tanh(self.left(left)), dim=1), normalize(self.right(right), dim=1), self.scale


def contrastive(strategy: Strategy, accumulate_rows: int = 10) -> list[Tensor]:
    """Train on CLIP's loss, which couples all pairs of the global batch. The last batch has one pair."""
    pairs = torch.randn(21, 2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    train = strategy.dataloader(pairs, global_batch_size=accumulate_rows)
    model = TwoTowers().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model, optimizer = strategy.prepare(model, optimizer)
    for _ in range(2):
        for batch in train:
            left, right, scale = model(batch)
            left, right = strategy.gather((left, right), differentiable=True)
            logits = scale * left @ right.T
            loss = (
                cross_entropy(logits, torch.arange(len(left))) + cross_entropy(logits.T, torch.arange(len(left)))
            ) / 2
            strategy.step(loss + (left.detach() ** 4).mean(), optimizer)
    return [p.detach().clone() for p in model.parameters()]


def in_order(backend: str, shares: tuple[int, ...] | None) -> list[Any]:
    """Gather in the order of loaders, in their loops and after them. One process has it by itself."""
    with unitrain.init(
        backend=backend, device="cpu", timeout_s=30, precision="fp64", shares=shares, deterministic=True
    ) as strategy:
        model = strategy.prepare(nn.Linear(1, 1))
        values = torch.arange(13.0, dtype=torch.float64)
        results: list[Any] = []
        for options in (
            {"global_batch_size": 5, "micro_batch_size": 3},
            {"global_batch_size": 4, "shuffle": True},  # the last batch has one sample
            {"batch_sampler": [[3, 2, 1, 0], [4], [8, 5, 6, 7], [9]]},
        ):
            loader = strategy.dataloader(values, **options)
            mine: list[str] = []
            seen: list[float] = []
            with strategy.evaluation(model):
                for batch in loader:
                    rows, names = strategy.gather((batch, [f"{v:g}" for v in batch.tolist()]), in_order=loader)
                    assert [float(name) for name in names] == rows.tolist()
                    assert strategy.gather({"again": -batch}, in_order=loader)["again"].tolist() == (-rows).tolist()
                    seen += rows.tolist()
                    mine += [f"{v:g}" for v in batch.tolist()]  # with stand-ins
            results += [seen, strategy.gather(mine, in_order=loader)]
        for data in (values, Numbers(13)):
            loader = strategy.dataloader(data, global_batch_size=4)
            with strategy.evaluation(model):
                for _ in range(2):
                    kept = [batch for batch in loader if not loader.stand_in]
                    together = torch.cat([torch.empty(0, dtype=torch.float64), *kept])
                    results.append(strategy.gather(together, in_order=loader).tolist())
                for number, batch in enumerate(loader):
                    kept = [*kept[:number], batch]
                    if number == 1:
                        break
                results.append(strategy.gather(torch.cat(kept), in_order=loader).tolist())
        train, embed = strategy.dataloader(values, global_batch_size=5, shuffle=True), nn.Linear(1, 1).double()
        with torch.no_grad():
            embed.weight.fill_(0.5), embed.bias.fill_(0.1)
        embed, optimizer = strategy.prepare(embed, torch.optim.SGD(embed.parameters(), 0.1))
        for batch in train:
            rows = strategy.gather(torch.tanh(embed(batch[:, None]))[:, 0], differentiable=True, in_order=train)
            strategy.step((rows * torch.arange(1.0, len(rows) + 1)).mean(), optimizer)  # depends on the order
        results += [parameter.item() for parameter in strategy.export(embed).parameters()]
        # A row too few on one rank is an error on all, as is another loader.
        for batch in train:
            with pytest.raises(UsageError, match=r"gather got \d rows for \d samples of .* on rank 0"):
                strategy.gather(batch[1:] if strategy.is_main else batch, in_order=train)
            strategy.step(embed(batch[:, None]).mean(), optimizer)
        with pytest.raises(UsageError, match="not iterated over"):
            strategy.gather(values, in_order=strategy.dataloader(values, batch_size=1))
        return results


@pytest.mark.parametrize(
    ("backend", "nprocs", "shares"),
    [
        pytest.param("ddp", 3, (2, 1, 1), id="ddp-3-shares"),
        pytest.param("horovod", 2, None, id="horovod-2", marks=HOROVOD),
        pytest.param("fsdp", 2, None, id="fsdp-2", marks=FSDP),
    ],
)
def test_rows_come_in_the_order_of_one_process(backend: str, nprocs: int, shares: tuple[int, ...] | None) -> None:
    expected = in_order("single", None)
    assert expected[0] == list(range(13))
    for results in run_ranks(in_order, backend, shares, nprocs=nprocs):
        assert len(results) == len(expected)
        for found, alone in zip(results, expected, strict=True):
            assert found == (pytest.approx(alone, abs=1e-9) if isinstance(alone, float) else alone)


def refused(strategy: Strategy) -> list[str]:
    messages = []
    for value in (
        torch.ones(2, 3 + strategy.rank),
        {f"key{strategy.rank}": torch.ones(2)},
        [torch.ones(2)] if strategy.rank else torch.ones(2),
    ):
        with pytest.raises(UsageError) as error:
            strategy.gather(value)
        messages.append(str(error.value))
    assert strategy.gather(torch.tensor(strategy.rank)).tolist() == list(range(strategy.world_size))
    return messages


def everything(backend: str, debug: bool) -> tuple[Any, ...]:
    with unitrain.init(backend=backend, device="cpu", timeout_s=30, precision="fp64", debug=debug) as strategy:
        return structures(strategy), evaluations(strategy), contrastive(strategy), refused(strategy)


@pytest.fixture(scope="module")
def of_one() -> tuple[Any, ...]:
    with unitrain.init(backend="single", device="cpu", precision="fp64") as strategy:
        return structures(strategy), contrastive(strategy)


@pytest.mark.parametrize(("backend", "nprocs"), WORLDS)
def test_gathered_rows_are_those_of_one_process(backend: str, nprocs: int, of_one: tuple[Any, ...]) -> None:
    check_structures(of_one[0], 1)
    for gathered, evaluated, trained, errors in run_ranks(everything, backend, nprocs == 3, nprocs=nprocs):
        check_structures(gathered, nprocs)
        assert [sorted(values) for values in evaluated[:2]] == [[float(v) for v in range(10)]] * 2
        assert sorted(evaluated[2]) == Shards([9, 6, 3]).samples()
        assert sorted(evaluated[3]) == [2.0 * v for v in range(10)]
        for weight, alone in zip(trained, of_one[1], strict=True):
            torch.testing.assert_close(weight, alone, rtol=0, atol=1e-9)
        shape, keys, kinds = errors
        assert "int" not in shape
        assert "'float32[rows, 3]' on rank 0; 'float32[rows, 4]' on rank 1" in shape
        assert "{'key0': 'float32[rows]'} on rank 0; {'key1': 'float32[rows]'} on rank 1" in keys
        assert "'float32[rows]' on rank 0; 'list' on rank 1" in kinds


def alone_in_a_batch(backend: str) -> str:
    with unitrain.init(backend=backend, device="cpu", timeout_s=20) as strategy:
        with strategy.evaluation(nn.Identity()):
            for batch in strategy.dataloader(torch.arange(1.0), global_batch_size=4):
                with pytest.raises(UsageError, match=r"gather was called .* Call it after the loop") as error:
                    strategy.gather(batch)
                return str(error.value)
        return ""


def test_a_gather_that_other_ranks_can_not_know_of_is_refused() -> None:
    first, second = run_ranks(alone_in_a_batch, "ddp")
    assert "more data or fewer processes" in first
    assert second == ""


def test_gradients_can_not_flow_back_to_lists() -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        row = torch.ones(2, requires_grad=True)
        with pytest.raises(UsageError, match="concatenate them"):
            strategy.gather([row], differentiable=True)
        assert not strategy.gather(row).requires_grad
        strategy.gather((row,), differentiable=True)[0].sum().backward()  # type: ignore[no-untyped-call]
        assert row.grad is not None
