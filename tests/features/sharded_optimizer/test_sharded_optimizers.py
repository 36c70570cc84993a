"""With ``shard_optimizer``, each rank has its rows of the state, and the weights are those of one process."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD
from pretended import pretended_rank
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import TensorDataset

import unitrain
from unitrain import Strategy, UsageError
from unitrain.communication.sharding import OwnedBy
from unitrain.communication.structure import tensors
from unitrain.features.ema import EMA
from unitrain.features.sharded_optimizer.optimizers import ShardedOptimizers

WORDS, WIDTH, LENGTH, SAMPLES, BATCH = 36, 24, 6, 22, 7
EXACT = 1e-9
Groups = list[dict[str, Any]]


class Block(nn.Module):
    """A transformer's block without attention, with a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.layers(self.norm(x).cumsum(1))
        return out


class Model(nn.Module):
    """A language model with a tied head, frozen positions, a convolution in another layout and unused weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(1, LENGTH, WIDTH), requires_grad=False)
        self.mix = nn.Conv2d(1, 2, (3, 3), padding=1).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.turned = nn.Parameter(torch.randn(WIDTH, 3).t())
        self.unused = nn.Linear(3, 5)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.positions
        x = x + self.mix(x.unsqueeze(1)).mean(1) + self.turned.mean(0)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def groups(model: nn.Module) -> Groups:
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "lr": 0.005},
    ]


class Lamb(Optimizer):
    """Scales the update of a parameter by norms of all of its elements, and counts steps in the group."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "step": 0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            torch.stack([p.grad.norm() for p in used])  # fails without any
            group["step"] += 1
            for p in used:
                state = self.state[p]
                if not state:
                    state.update(first=torch.zeros_like(p), second=torch.zeros_like(p))
                first, second = state["first"].lerp_(p.grad, 0.1), state["second"].lerp_(p.grad.square(), 0.01)
                corrected = first / (1 - 0.9 ** group["step"])
                update = corrected / ((second / (1 - 0.99 ** group["step"])).sqrt() + 1e-6) + group["weight_decay"] * p
                norm, size = p.norm(), update.norm()
                ratio = torch.where((norm > 0) & (size > 0), norm / size, 1.0)
                p.sub_(update * ratio * group["lr"])


MAKERS: dict[str, Callable[[Groups], Optimizer]] = {
    "sgd": lambda its: SGD(its, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda its: AdamW(its, lr=0.01),
    "fused": lambda its: AdamW(its, lr=0.01, fused=True),
    "foreach": lambda its: Adam(its, lr=0.01, foreach=True, amsgrad=True),
    "rmsprop": lambda its: RMSprop(its, lr=0.005, momentum=0.5, centered=True),
    "adagrad": lambda its: Adagrad(its, lr=0.01, initial_accumulator_value=0.1),
    "lamb": lambda its: Lamb(its, lr=0.01),
}
State = dict[str, Tensor]
Result = tuple[list[float], State]


def made(name: str) -> tuple[Model, Optimizer, LRScheduler]:
    """Return a model, an optimizer with two groups and a scheduler; the same on all ranks."""
    torch.manual_seed(3)
    model = Model()
    optimizer = MAKERS[name](groups(model))
    return model, optimizer, StepLR(optimizer, 3, 0.5)


def texts() -> TensorDataset:
    words = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(4))
    return TensorDataset(words[:, :-1], words[:, 1:])


def loss_of(model: nn.Module, words: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(model(words).flatten(0, 1), following.flatten())


def by_hand(name: str, epochs: int) -> Result:
    """Train without UniTrain; return the losses and the weights."""
    model, optimizer, scheduler = made(name)
    model.double()
    optimizer.load_state_dict(optimizer.state_dict())  # what Adagrad has made in float32
    losses = []
    for _, rows in itertools.product(range(epochs), torch.split(torch.arange(SAMPLES), BATCH)):
        optimizer.zero_grad()
        loss = loss_of(model, *texts()[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def settings_of(backend: str) -> dict[str, Any]:
    section = {backend: {"find_unused_parameters": True}} if backend in ("ddp", "fsdp") else {}
    common = {"precision": "fp64", "clip_norm": 0.7, "accumulate": 2, "device": "cpu", "timeout_s": 60}
    return {"backend": backend, **common, **section}


def held(optimizer: Optimizer) -> int:
    """Return the bytes of the memory that an optimizer's state occupies."""
    states = [value for its in optimizer.state.values() for value in tensors(its)]
    return sum(value.untyped_storage().nbytes() for value in states if value.dim())


def run(strategy: Strategy, name: str, epochs: int, folder: str | None = None) -> tuple[Result, int]:
    """Train up to an epoch, and save; return losses and weights, and the bytes of this rank's state."""
    model, optimizer, scheduler = strategy.prepare(*made(name))
    loader = strategy.dataloader(texts(), global_batch_size=BATCH)
    checkpoint = None
    if folder is not None:
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        checkpoint.resume()
        size = held(optimizer)
    losses = []
    for _ in loader.epochs(epochs):
        mean = strategy.meter()
        for words, following in loader:
            loss = loss_of(model, words, following)
            mean.add(mean=loss, count=len(words))
            if strategy.step(loss, optimizer, scheduler).stepped:
                losses.append(mean.value())
                mean = strategy.meter()
    strategy.check_in_sync(model)  # bit for bit
    if checkpoint is not None:
        checkpoint.save()
        assert size in (0, held(optimizer)), "what is resumed takes no more memory than what training makes"
    return (losses, strategy.export(model).state_dict()), held(optimizer)


def assert_close(found: Result, expected: Result, first: int = 0) -> None:
    """Assert that losses, from the epoch ``first`` on, and weights are the expected ones."""
    steps = first * -(-SAMPLES // BATCH)
    assert found[0] == pytest.approx(expected[0][steps : steps + len(found[0])], abs=EXACT)
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=0, atol=EXACT, msg=name)


def train_with_all(backend: str) -> dict[str, tuple[Result, int]]:
    found = {}
    for name in MAKERS:
        with unitrain.init(shard_optimizer=True, **settings_of(backend)) as strategy:
            found[name] = run(strategy, name, 2)
    return found


@pytest.mark.parametrize(
    ("backend", "world", "launcher"),
    [("ddp", 2, "spawn"), pytest.param("horovod", 3, "horovodrun", marks=[HOROVOD, pytest.mark.soak])],
)
def test_losses_and_weights_are_those_of_a_plain_loop_and_each_rank_has_its_share(
    backend: str, world: int, launcher: Any
) -> None:
    ranks = run_ranks(train_with_all, backend, nprocs=world, launcher=launcher)
    for name in MAKERS:
        expected = by_hand(name, 2)
        with unitrain.init(shard_optimizer=True, **settings_of("single")) as strategy:
            alone, whole = run(strategy, name, 2)
        assert_close(alone, expected)
        for found in ranks:
            assert_close(found[name][0], expected)
            assert all(map(torch.equal, found[name][0][1].values(), ranks[0][name][0][1].values()))
            assert found[name][1] < 0.7 * whole, name
        assert sum(found[name][1] for found in ranks) == whole, name


CHAIN: list[tuple[str, int, Any, bool]] = [
    ("ddp", 2, "spawn", True),
    ("horovod", 3, "horovodrun", False),
    ("horovod", 2, "horovodrun", True),
    ("single", 1, "spawn", False),
    ("fsdp", 2, "spawn", True),
    ("ddp", 3, "spawn", True),
]


def continue_in(backend: str, epochs: int, folder: str, shards: bool) -> tuple[Result, int]:
    with unitrain.init(shard_optimizer=shards, **settings_of(backend)) as strategy:
        return run(strategy, "adamw", epochs, folder)


@pytest.mark.all("five worlds; the states are saved and loaded in make test")
@HOROVOD
def test_a_run_continues_in_any_world_with_and_without_it(tmp_path: Path) -> None:
    expected = by_hand("adamw", len(CHAIN))
    for epoch, (backend, world, launcher, shards) in enumerate(CHAIN):
        arguments = (backend, epoch + 1, str(tmp_path), shards)
        for found, _ in run_ranks(continue_in, *arguments, nprocs=world, launcher=launcher):
            assert found[0] == pytest.approx(expected[0][4 * epoch : 4 * epoch + 4], abs=EXACT), (backend, world)
        files = [path.name for path in (tmp_path / f"step-{4 * epoch + 4:010d}").iterdir()]
        assert sum(name.endswith(".distcp") for name in files) == (world if shards else 0), files
    assert_close(found, expected, first=len(CHAIN) - 1)


@on_ranks()
def test_states_are_saved_and_loaded_as_a_whole_and_nothing_loses_state_silently(tmp_path: Path) -> None:
    """In all ways, also back within a run."""
    path = tmp_path / "optimizer.pt"
    with unitrain.init(shard_optimizer=True, **{**settings_of("ddp"), "accumulate": 1}) as strategy:
        model, optimizer, _ = strategy.prepare(*made("adamw"))
        checkpoint = strategy.checkpoint(tmp_path / "run", model=model, optimizer=optimizer)
        ema = strategy.add(EMA(model, 0.5))
        batch = texts()[:8]

        def steps() -> State:
            for _ in range(2):
                strategy.step(loss_of(model, *batch), optimizer)
            return {name: value.clone() for name, value in strategy.unwrap(model).state_dict().items()}

        steps()
        checkpoint.save()
        own = {p: its["exp_avg"].clone() for p, its in optimizer.state.items()}
        weights = [p for p in model.parameters() if p.grad is not None or p.requires_grad]
        assert 0 < len(own) < len(weights)
        strategy.save({"optimizer": optimizer, "model": model}, path)
        after = steps()
        averages = ema.state_dict()
        assert not torch.equal(averages["words.weight"], after["words.weight"])
        memory = {p: its["exp_avg"].data_ptr() for p, its in optimizer.state.items()}
        checkpoint.resume()
        assert {p: its["exp_avg"].data_ptr() for p, its in optimizer.state.items()} == memory
        assert all(torch.equal(optimizer.state[p]["exp_avg"], moment) for p, moment in own.items())
        assert all(map(torch.equal, steps().values(), after.values()))
        loaded = strategy.load(path)
        assert loaded["optimizer"]["state"][2]["exp_avg"].shape == (WORDS, WIDTH)
        optimizer.load_state_dict(loaded["optimizer"])
        assert list(optimizer.state) == list(own)
        strategy.unwrap(model).load_state_dict(loaded["model"])
        assert all(map(torch.equal, steps().values(), after.values()))
        optimizer.load_state_dict(optimizer.state_dict())
        assert list(optimizer.state) == list(own)
        strategy.prepare(optimizer)
        state = optimizer.state_dict()["state"]
        theirs = {number: its for number, its in state.items() if isinstance(its, OwnedBy)}
        assert {its.rank for its in theirs.values()} == {1 - strategy.rank}
        assert strategy.all_reduce(torch.tensor(len(own))) == len(weights) - 2  # which are not used
        mine = {number: OwnedBy(strategy.rank) for number in state.keys() - theirs.keys()}
        whole = optimizer.state_dict()
        for lossy in (
            lambda: torch.save(optimizer.state_dict(), io.BytesIO()),
            lambda: copy.deepcopy(optimizer.state_dict()),
            lambda: copy.deepcopy(optimizer),
            lambda: made("adamw")[1].load_state_dict(whole),
            lambda: optimizer.load_state_dict({**whole, "state": mine}),
        ):
            with pytest.raises(UsageError, match=r"use strategy\.checkpoint or strategy\.save"):
                lossy()
        repr(optimizer.state_dict())
    with pytest.raises(UsageError, match=r"can't step after strategy\.close\(\)"):
        optimizer.step()
    # Another process may use what was saved without UniTrain.
    plain, by_itself, _ = made("adamw")
    by_itself.load_state_dict(loaded["optimizer"])
    trained = {p for p in plain.parameters() if p.requires_grad} - set(plain.unused.parameters())
    assert by_itself.state.keys() == trained
    assert all(p.shape == its["exp_avg"].shape for p, its in by_itself.state.items())


class Careless(SGD):
    """Steps twice through its base class, or not at all."""

    fails = within = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.fails:
            raise RuntimeError("no step")
        Careless.within = True  # torch also calls hooks in a step of the base class, if it has had an instance
        super().step(closure)
        super().step(closure)
        Careless.within = False


class Clipping(SGD):
    """Has the option by which timm's LAMB clips all gradients together."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__([{"params": list(params), "max_grad_norm": 1.0}], **options)


class Prodigy(SGD):
    """Has the name of an optimizer that estimates one learning rate for all parameters."""


class Derived(Prodigy):
    """Is one under another name."""


class Lookahead(SGD):
    """Has the state of another optimizer as its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": self.param_groups}


def small() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


QUICK: dict[str, Any] = {"backend": "ddp", "device": "cpu", "timeout_s": 30}


@on_ranks()
def test_hooks_see_whole_parameters_and_a_step_that_fails_leaves_them() -> None:
    """Also of an optimizer that steps through its base class."""
    seen = set()

    def note(optimizer: Optimizer, *_: Any) -> None:
        if not Careless.within:
            seen.add(tuple(tuple(p.shape) for p in optimizer.param_groups[0]["params"]))

    with unitrain.init(shard_optimizer=True, **QUICK) as strategy:
        SGD(small().parameters(), lr=0.1)
        model, expected = small(), small()
        prepared, optimizer = strategy.prepare(model, Careless(model.parameters(), lr=0.1, momentum=0.9))
        by_hand = Careless(expected.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(note)
        inputs, targets = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 1)
        mine = slice(2 * strategy.rank, 2 * strategy.rank + 2)
        for _ in range(2):
            strategy.step(mse_loss(prepared(inputs[mine]), targets[mine]), optimizer)
            by_hand.zero_grad()
            mse_loss(expected(inputs), targets).backward()  # type: ignore[no-untyped-call]
            by_hand.step()
            for p in model.parameters():
                p.data = p.detach().clone()  # in other memory
        torch.testing.assert_close(model.state_dict(), expected.state_dict())
        Careless.fails = True
        with pytest.raises(RuntimeError, match="no step"):
            strategy.step(mse_loss(prepared(inputs[mine]), targets[mine]), optimizer)
        Careless.fails = False
        assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
        assert 0 < len(optimizer.state) < 4
        assert optimizer.state.keys() <= set(model.parameters())
    assert seen == {((5, 4), (5,), (1, 5), (1,))}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Clipping, r"this Clipping: it computes .* Set shard_opt.* clip_norm\.\)"),
        (Prodigy, r"support this Prodigy: it computes a value"),
        (Derived, r"support this Derived: it computes a value"),
        (Lookahead, r"does not support Lookahead: its state_dict\(\) would return one rank's state, since it does not"),
    ],
)
@on_ranks()
def test_what_can_t_be_sharded_is_refused(kind: type[SGD], said: str) -> None:
    with unitrain.init(shard_optimizer=True, **QUICK) as strategy, pytest.raises(UsageError, match=said):
        strategy.prepare(module := small(), kind(module.parameters(), lr=0.0, momentum=0.9))


def train_in_groups(alone: bool) -> tuple[State, list[int], int]:
    """Train with a group for each parameter, of which a rank may own none. Return weights, steps and states."""
    with unitrain.init(shard_optimizer=True, **QUICK | ({"backend": "single"} if alone else {})) as strategy:
        model = small()
        first, *rest = model.parameters()
        first.requires_grad_(False)
        model, optimizer = strategy.prepare(model, Lamb([{"params": [first, rest[0]]}, {"params": rest[1:2]}], lr=0.1))
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        mine = slice(2 * strategy.rank, 2 * strategy.rank + 2) if strategy.world_size > 1 else slice(4)
        for step in range(6):
            if step == 2:
                first.requires_grad_(True)
            if step == 4:
                optimizer.add_param_group({"params": rest[2:]})
            strategy.step(model(inputs[mine]).square().mean(), optimizer)
        steps = [group["step"] for group in optimizer.state_dict()["param_groups"]]
        states = int(strategy.all_reduce(torch.tensor(len(optimizer.state))))
        return strategy.export(model).state_dict(), steps, states


def test_a_rank_may_own_nothing_of_a_group() -> None:
    expected, steps, states = train_in_groups(alone=True)
    assert states == 4
    for found, its, held_by_all in run_ranks(train_in_groups, False):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert its == steps == [6, 6, 2]
        assert held_by_all == states


GPT_2 = [(50257, 768), (1024, 768), (768,), (768,)]  # small, with its head tied to the embedding
GPT_2_LAYER = [(768,)] * 6 + [(2304, 768), (2304,), (768, 768), (3072, 768), (3072,), (768, 3072)]


@pytest.mark.parametrize(("world", "most"), [(2, 0.501), (3, 0.336), (4, 0.311), (8, 0.311)])
def test_state_is_balanced_unless_one_parameter_is_larger_than_a_share(world: int, most: float) -> None:
    rank, sharded = pretended_rank(world_size=world), ShardedOptimizers()
    sharded.plug_in(rank.sockets)
    parameters = [nn.Parameter(torch.empty(shape, device="meta")) for shape in [*GPT_2, *GPT_2_LAYER * 12]]
    sharded.registered(SGD(parameters, lr=0.1))
    total = sum(p.numel() for p in parameters)
    assert total == 124_439_808
    loads = [
        sum(p.numel() for p in parameters if rank.communicator.sharding.owners[p] == owner) for owner in range(world)
    ]
    assert sum(loads) == total
    assert max(loads) / total <= most
    others = sorted(loads)[:-1] if world > 3 else loads
    assert max(others) <= 1.02 * sum(others) / len(others)


def under_fsdp() -> bool:
    with unitrain.init(shard_optimizer=True, backend="fsdp", device="cpu", timeout_s=30) as strategy:
        model, optimizer = strategy.prepare(module := small(), SGD(module.parameters(), lr=0.1))
        strategy.step(model(torch.ones(2, 4)).sum(), optimizer)
        return bool(strategy.communicator.sharding.owners)


def test_it_changes_nothing_under_fsdp() -> None:
    assert run_ranks(under_fsdp) == [False, False]
