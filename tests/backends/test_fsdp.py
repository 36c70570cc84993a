"""The backend fsdp: it trains as a plain loop on one device, with a share of the memory, and resumes in any world."""

from __future__ import annotations

import gc
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import FSDP, FSDP_IN_16_BITS, GPU, compiled_by
from partly_used import PartlyUsed
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import TensorDataset

import unitrain
from unitrain import BackendError, ConfigError, UsageError
from unitrain.features.ema import EMA
from unitrain.job.starting.spawn import spawn_environments
from unitrain.testing import ranks
from unitrain.testing.models import step_by_hand

WORDS, WIDTH, LENGTH, SAMPLES, BATCH = 17, 8, 6, 22, 7
EXACT = 1e-9


class Block(nn.Module):
    """A transformer's block, with a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        x = x + self.scale * self.attention(normed, normed, normed, need_weights=False)[0]
        out: Tensor = x + self.layers(self.between(x))
        return out


class Transformer(nn.Module):
    """A language model whose head is its embedding; the positions are frozen."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def made() -> tuple[Transformer, Optimizer, LRScheduler]:
    """Return a model, an optimizer with two groups, and a scheduler; the same on all ranks."""
    torch.manual_seed(3)
    model = Transformer()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=0.01)
    return model, optimizer, StepLR(optimizer, 3, 0.5)


def texts() -> TensorDataset:
    words = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(4))
    return TensorDataset(words[:, :-1], words[:, 1:])


def loss_of(model: nn.Module, words: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(model(words).flatten(0, 1), following.flatten())


State = dict[str, Tensor]


def by_hand(epochs: int) -> tuple[list[float], State]:
    """Train without UniTrain; return the losses and the weights."""
    model, optimizer, scheduler = made()
    model.double()
    losses = []
    for _ in range(epochs):
        for rows in torch.split(torch.arange(SAMPLES), BATCH):
            optimizer.zero_grad()
            loss = loss_of(model, *texts()[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return losses, model.state_dict()


def train(epochs: int, settings: dict[str, Any], folder: str | None = None) -> tuple[list[float], State, float]:
    """Train up to an epoch; return the losses, the weights, and this rank's share of weights and optimizer state."""
    defaults = {"precision": "fp64", "clip_norm": 0.7, "accumulate": 2, "device": "cpu", "timeout_s": 60}
    with unitrain.init(**{**defaults, **settings}) as strategy:
        model, optimizer, scheduler = strategy.prepare(*made())
        loader = strategy.dataloader(texts(), global_batch_size=BATCH)
        checkpoint = None
        if folder is not None:
            checkpoint = strategy.checkpoint(
                folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader
            )
            checkpoint.resume()
        losses = []
        for _ in loader.epochs(epochs):
            mean = strategy.meter()
            for words, following in loader:
                loss = loss_of(model, words, following)
                mean.add(mean=loss, count=len(words))
                if strategy.step(loss, optimizer, scheduler).stepped:
                    losses.append(mean.value())
                    mean = strategy.meter()
        if checkpoint is not None:
            checkpoint.save()
        strategy.check_in_sync(model)
        states = [value for its in optimizer.state.values() for value in its.values() if value.dim()]
        held = [strategy.communicator.sharding.to_local(tensor.detach()) for tensor in (*model.parameters(), *states)]
        share = sum(part.numel() for part in held) / sum(tensor.numel() for tensor in (*model.parameters(), *states))
        return losses, strategy.export(model).state_dict(), share


def assert_close(found: tuple[list[float], State, float], expected: tuple[list[float], State], first: int = 0) -> None:
    """Assert that losses, from the epoch ``first`` on, and weights are the expected ones."""
    losses, weights = expected
    steps = first * -(-SAMPLES // BATCH)
    assert found[0] == pytest.approx(losses[steps : steps + len(found[0])], abs=EXACT)
    assert list(found[1]) == list(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(found[1][name], weight, rtol=0, atol=EXACT, msg=name)


WAYS: list[dict[str, Any]] = [
    {},
    {"fsdp": {"reshard_after_forward": False}, "debug": True},
    {"fsdp": {"wrap": ["Block", "Linear"]}, "activation_checkpointing": ["Block"]},
    {"fsdp": {"wrap": 300, "find_unused_parameters": True}, "compile": True},
]


def train_in_ways(ways: list[dict[str, Any]]) -> list[tuple[list[float], State, float]]:
    with compiled_by("eager"):
        return [train(2, {"backend": "fsdp", **way}) for way in ways]


@pytest.mark.parametrize(
    ("world", "ways"),
    [(2, WAYS[:3]), *(pytest.param(*slow, marks=pytest.mark.soak) for slow in ((2, WAYS[3:]), (3, WAYS)))],
)
def test_losses_and_weights_are_those_of_a_plain_loop_and_each_rank_has_a_share(world: int, ways: Any) -> None:
    expected = by_hand(2)
    assert not torch.equal(expected[1]["words.weight"], made()[0].words.weight)
    for found in run_ranks(train_in_ways, ways, nprocs=world):
        for its in found:
            assert_close(its, expected)
            assert its[2] < 1.2 / world, "the shares of small parameters are uneven"


def train_in_bf16(backend: str) -> tuple[list[float], set[tuple[bool, torch.dtype]]]:
    """Train, and return the losses and the dtypes of weights in the forward."""
    seen = set()
    with unitrain.init(backend=backend, precision="bf16", device="cpu", timeout_s=60) as strategy:
        model, optimizer, _ = strategy.prepare(*made())
        whole = strategy.unwrap(model)
        for layer in (whole.get_submodule("blocks.0.layers.0"), whole.get_submodule("blocks.0.before")):
            layer.register_forward_pre_hook(
                lambda layer, _: seen.add((isinstance(layer, nn.Linear), layer.weight.dtype))
            )
        losses = []
        for words, following in strategy.dataloader(texts(), global_batch_size=BATCH):
            with strategy.autocast():
                loss = loss_of(model, words, following)
            losses.append(float(strategy.all_reduce(loss.detach(), "mean")))
            strategy.step(loss, optimizer)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    return losses, seen


@FSDP_IN_16_BITS
def test_weights_are_gathered_in_bf16_where_autocast_would_convert_them() -> None:
    """So the losses are those of DDP, whose weights autocast converts."""
    losses, dtypes = run_ranks(train_in_bf16, "fsdp")[0]
    assert dtypes == {(True, torch.bfloat16), (False, torch.float32)}
    assert losses == pytest.approx(run_ranks(train_in_bf16, "ddp")[0][0], rel=1e-5)


# ----------------------------------------------------------------------------------------------------------- memory

LAYERS, LAYER_MB = 12, 4
MB = 2**20


def alive_mb() -> float:
    """Return the memory of all tensors of this process."""
    gc.collect()
    sizes: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules warn as they are looked at
        for found in gc.get_objects():
            if isinstance(found, Tensor) and type(found) in (Tensor, nn.Parameter, DTensor) and not found.is_sparse:
                storage = getattr(found, "_local_tensor", found).untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values()) / MB


def occupied(folder: str) -> tuple[float, float]:
    """Return the memory of tensors after two steps, and after they were saved and resumed."""
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=60) as strategy:
        before = alive_mb()
        model = nn.Sequential(*(nn.Linear(1024, LAYER_MB * 256, bias=False) for _ in range(LAYERS)))
        model, optimizer = strategy.prepare(model, AdamW(model.parameters()))
        inputs = torch.full((2, 1024), 1.0 + strategy.rank)
        for _ in range(2):
            strategy.step(model(inputs).square().mean(), optimizer)
        stepped = alive_mb() - before
        checkpoint = strategy.checkpoint(folder, background=False, model=model, optimizer=optimizer)
        checkpoint.save()
        checkpoint.resume()
        return stepped, alive_mb() - before


def test_a_rank_has_its_share_of_weights_and_state_and_nothing_more(tmp_path: Path) -> None:
    """Gradients are gone after a step. FSDP keeps a buffer of the size of a unit."""
    share = 3 * LAYERS * LAYER_MB / 2
    for found in run_ranks(occupied, str(tmp_path)):
        for memory in found:
            assert share <= memory <= share + LAYER_MB + 1


# ------------------------------------------------------------------------------------------------------ preparation


@on_ranks()
def test_the_optimizer_may_be_made_and_prepared_before_or_after_and_is_refused_if_it_is_left_out() -> None:
    results = []
    for order in ("together", "optimizer later", "optimizer made later", "left out"):
        with unitrain.init(backend="fsdp", precision="fp64", device="cpu", timeout_s=30) as strategy:
            torch.manual_seed(strategy.rank)  # rank 0's weights and state count
            module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
            stale = module.get_parameter("0.weight")
            optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
            for parameter in module.parameters():
                optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, 1.0 + strategy.rank)}
            scheduler = StepLR(optimizer, 1, 0.5)
            if order == "together":
                strategy.prepare(module, optimizer)
            else:
                strategy.prepare(module)
            if order == "optimizer later":
                optimizer = strategy.prepare(optimizer)
            elif order == "optimizer made later":
                optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
                for parameter in module.parameters():
                    optimizer.state[parameter] = {"momentum_buffer": torch.ones_like(parameter.detach())}
                optimizer, scheduler = strategy.prepare(optimizer, StepLR(optimizer, 1, 0.5))
            assert stale.numel() == 0, "it takes no memory, and whoever uses it fails"
            loss = module(torch.ones(2, 5, dtype=torch.float64)).square().mean()
            if order == "left out":
                said = (
                    r"4 parameters \(0\.weight, 0\.bias, 1\.weight, \.\.\.\) that prepare\(\) has replaced, .*pass the"
                )
                with pytest.raises(UsageError, match=said):
                    strategy.step(loss, optimizer, scheduler)
                break
            strategy.step(loss, optimizer, scheduler)
            assert optimizer.param_groups[0]["lr"] == 0.05
            results.append(strategy.export(module).state_dict())
    for other in results[1:]:
        assert all(map(torch.equal, results[0].values(), other.values()))


@on_ranks()
def test_weights_that_were_gathered_before_a_step_are_not_used_after_it() -> None:
    """In all ways that gather weights."""
    words, following = texts()[:4]
    for reshard in (True, False):
        settings = {"reshard_after_forward": reshard}
        with unitrain.init(backend="fsdp", fsdp=settings, precision="fp64", device="cpu", timeout_s=30) as strategy:
            model, optimizer, _ = strategy.prepare(*made())
            found = []
            for _ in range(2):
                strategy.backward(loss_of(model, words, following), optimizer)
                with strategy.evaluation(model):
                    model(words)
                model(words)  # without a backward
                strategy.update(optimizer)
                with strategy.evaluation(model):
                    found.append(model(words))
                    torch.testing.assert_close(found[-1], strategy.export(model)(words).detach(), rtol=0, atol=EXACT)
            assert not torch.equal(found[0], found[1])


@on_ranks()
def test_an_export_has_the_weights_and_not_what_a_forward_has_made_of_them() -> None:
    settings = {"reshard_after_forward": False}
    with unitrain.init(backend="fsdp", fsdp=settings, precision="bf16", device="cpu", timeout_s=30) as strategy:
        model, _, _ = strategy.prepare(*made())
        before = strategy.export(model).state_dict()
        with strategy.autocast():
            model(texts()[:4][0])
        for name, weight in strategy.export(model).state_dict().items():
            assert weight.dtype == torch.float32
            assert torch.equal(weight, before[name]), name


@on_ranks()
def test_an_average_of_weights_is_that_of_one_process(tmp_path: Path) -> None:
    """Exported, saved, and loaded after another step."""
    plain, by_itself, _ = made()
    plain.double()
    expected = {name: weight.clone() for name, weight in plain.state_dict().items()}
    with unitrain.init(backend="fsdp", precision="fp64", device="cpu", timeout_s=30) as strategy:
        model, optimizer, _ = strategy.prepare(*made())
        ema = strategy.add(EMA(model, 0.5))
        words, following = texts()[:4]
        for _ in range(3):
            strategy.step(loss_of(model, words, following), optimizer)
            step_by_hand(loss_of(plain, words, following), by_itself)
            for name, weight in plain.state_dict().items():
                expected[name] = (expected[name] + weight) / 2
        with strategy.evaluation(ema):
            evaluated = float(loss_of(model, words, following))
        exported = strategy.export(ema)
        assert float(loss_of(exported, words, following)) == pytest.approx(evaluated, abs=EXACT)
        strategy.save({"ema": ema, "optimizer": optimizer}, tmp_path / "average.pt")
        saved = strategy.load(tmp_path / "average.pt")
        assert saved["optimizer"]["state"][0]["exp_avg"].shape == (WORDS, WIDTH)
        strategy.step(loss_of(model, words, following), optimizer)
        ema.load_state_dict(ema.state_dict())
        averaged, trained = exported.state_dict(), strategy.export(model).state_dict()
        assert list(averaged) == list(saved["ema"]) == list(expected)
        for name, weight in expected.items():
            torch.testing.assert_close(averaged[name], weight, rtol=0, atol=EXACT, msg=name)
            assert torch.equal(saved["ema"][name], averaged[name])
            assert name == "positions" or not torch.equal(trained[name], averaged[name])


@on_ranks()
def test_what_can_t_be_done_with_shards_is_refused_with_a_remedy() -> None:
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        model, optimizer, _ = strategy.prepare(*made())
        words, following = texts()[:2]
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            strategy.step(model.head(torch.ones(1, WIDTH)).sum(), optimizer)  # a part, before the model: it is no root
        strategy.step(loss_of(model, words, following), optimizer)
        unused = strategy.prepare(PartlyUsed())
        with pytest.raises(
            UsageError, match=r"all_reduce does not support shards: pass strategy\.full_tensor\(tensor\)"
        ):
            strategy.all_reduce(next(iter(model.parameters())))
        with pytest.raises(UsageError, match="sharded already, in part or whole"):
            strategy.prepare(nn.Sequential(model.blocks[0]))
        with pytest.raises(UsageError, match="a ModuleDict has no forward that could gather its weights"):
            strategy.prepare(nn.ModuleDict({"layer": nn.Linear(2, 2)}))
        said = (
            r"2 parameters were not used .* \(unused\.weight, unused\.bias.* set fsdp\.find_unused_parameters to true"
        )
        with pytest.raises(UsageError, match=said):
            strategy.step(unused(torch.ones(1, 2)).sum(), SGD(unused.parameters(), lr=0.1))


@on_ranks()
def test_wrong_settings_are_refused() -> None:
    for settings, said in (
        ({"communication": "nccl"}, "is nccl, but torch.distributed does not have nccl for devices of type cpu"),
        (
            {"wrap": ["Blok"]},
            r"names 'Blok', but the model has no module of that class with a forward\. Did you mean 'Block'",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            unitrain.init(backend="fsdp", device="cpu", fsdp=settings, timeout_s=30).prepare(made()[0])


def test_a_torch_that_is_too_old_is_refused_with_the_oldest_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(BackendError, match=rf"needs torch 2\.13 or newer, and this is {re.escape(torch.__version__)}"):
        unitrain.init(backend="fsdp", device="cpu")


# ---------------------------------------------------------------------------------------------------------- offload


@on_ranks()
def test_offload_is_without_effect_on_a_cpu_and_refused_with_fp16() -> None:
    with pytest.raises(ConfigError, match=r"fsdp\.cpu_offload does not support fp16"):
        unitrain.init(backend="fsdp", device="cpu", precision="fp16", fsdp={"cpu_offload": True})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(1, {"backend": "fsdp", "fsdp": {"cpu_offload": True}})
    assert any("fsdp.cpu_offload has no effect on a CPU" in str(warning.message) for warning in caught)
    assert_close(found, by_hand(1))


def train_offloaded(epochs: int, folder: str) -> tuple[list[float], State, set[str]]:
    """Train on a GPU that the ranks share. Return losses, weights and where a shard, its state and a buffer are."""
    settings: dict[str, Any] = {"backend": "fsdp", "device": "cuda:0", "fsdp": {"cpu_offload": True}}
    losses, weights, _ = train(epochs, settings, folder)
    with unitrain.init(**settings, precision="bf16", clip_norm=0.1, timeout_s=60) as strategy:
        with torch.device("meta"):
            model, optimizer, _ = made()
        model, optimizer = strategy.prepare(model, optimizer, initialise=True)
        words, following = (tensor.to(strategy.device) for tensor in texts()[:4])
        assert strategy.step(loss_of(model, words, following), optimizer).stepped
        weight = strategy.unwrap(model).get_parameter("blocks.0.layers.0.weight")
        parts = [weight.detach(), optimizer.state[weight]["exp_avg"]]
        where = {strategy.communicator.sharding.to_local(part).device.type for part in parts}
        assert strategy.full_tensor(weight.detach()).shape == (4 * WIDTH, WIDTH)
    return losses, weights, where


@pytest.mark.gpu
@GPU
@FSDP
def test_offloaded_shards_are_in_host_memory_and_train_the_same(tmp_path: Path) -> None:
    for epochs in (1, 2):
        for losses, weights, where in run_ranks(train_offloaded, epochs, str(tmp_path)):
            assert where == {"cpu"}
            assert_close((losses, weights, 0.0), by_hand(epochs), first=epochs - 1)


# ------------------------------------------------------------------------------------------------------ checkpoints


# ------------------------------------------------------------------------------------------------------- hosts


@contextmanager
def two_hosts(nprocs: int) -> Iterator[list[dict[str, str]]]:
    """Set up what a launcher does for processes on two hosts."""
    with spawn_environments(nprocs) as environments:
        size = nprocs // 2
        yield [
            {**its, "LOCAL_WORLD_SIZE": str(size), "LOCAL_RANK": str(i % size), "GROUP_RANK": str(i // size)}
            for i, its in enumerate(environments)
        ]


def train_on_hosts(folder: str) -> tuple[list[float], State, float]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    settings: dict[str, Any] = {"backend": "fsdp", "fsdp": {"shards": "host"}}
    with unitrain.init(**settings, device="cpu", timeout_s=77) as strategy:
        groups = strategy._backend._mesh.get_all_groups()  # type: ignore[attr-defined]
        assert [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in groups] == [77, 77]
        del groups
    return train(2, settings, folder)


@pytest.mark.all("four ranks")
def test_shards_of_a_host_are_replicated_between_hosts(tmp_path: Path) -> None:
    for found in ranks.run_ranks(train_on_hosts, str(tmp_path), nprocs=4, launcher=two_hosts):
        assert_close(found, by_hand(2))
        assert 0.4 < found[2] < 0.6
    assert_close(train(3, {"backend": "single"}, str(tmp_path)), by_hand(3), first=2)


def test_parameters_that_torch_can_not_shard_stay_whole() -> None:
    module = nn.Linear(2, 2)
    module.none = nn.Parameter(torch.empty(0))
    module.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    assert import_module("unitrain.backends.fsdp.units").not_divisible(module) == {module.none, module.codes}
