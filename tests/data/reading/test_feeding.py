"""Batches of any structure are moved to the device completely; on a GPU, ahead of use, with correct synchronisation."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from needs import GPU
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import unitrain
from unitrain.data.reading.feeding import feed, to_device

META = torch.device("meta")  # a device that any machine has, and on which it shows where a tensor is


class Pair(NamedTuple):
    inputs: Tensor
    name: str


@dataclass(frozen=True)
class Record:
    rows: Tensor
    parts: list[Tensor]
    derived: int = field(init=False, default=3)


class Movable:
    """Moves itself, as a graph or a tokenizer's output does."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def to(self, device: torch.device) -> Movable:
        return Movable(self.rows.to(device))


def test_every_tensor_is_moved_and_the_structure_kept() -> None:
    rows = torch.ones(2)
    batch = {
        "pair": Pair(rows, "name"),
        "record": Record(rows, [rows]),
        "ordered": OrderedDict(a=(rows, 1.5)),
        "default": defaultdict(list, x=[rows]),
        "movable": [Movable(rows)],
        "text": "text",
    }
    moved = to_device(batch, META)
    assert moved["pair"].inputs.device == moved["record"].rows.device == moved["record"].parts[0].device == META
    assert moved["ordered"]["a"][0].device == moved["default"]["x"][0].device == moved["movable"][0].rows.device == META
    assert {key: type(value) for key, value in moved.items()} == {key: type(value) for key, value in batch.items()}
    assert (moved["pair"].name, moved["record"].derived, moved["ordered"]["a"][1], moved["text"]) == (
        "name",
        3,
        1.5,
        "text",
    )
    assert moved["default"]["missing"] == []
    assert rows.device.type == "cpu"


class WithNonBlocking:
    """Notes how it was moved."""

    def __init__(self) -> None:
        self.moved: list[tuple[torch.device, bool]] = []

    def to(self, device: torch.device, non_blocking: bool = False) -> WithNonBlocking:
        self.moved.append((device, non_blocking))
        return self


def test_what_moves_itself_does_so_without_waiting_where_it_can() -> None:
    movable = WithNonBlocking()
    for device in (META, torch.device("cpu")):
        to_device(movable, device)
    assert movable.moved == [(META, True), (torch.device("cpu"), False)]


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether tensors were copied without waiting."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.non_blocking: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.non_blocking.append(bool(kwargs.get("non_blocking")))
        return func(*args, **(kwargs or {}))


def test_what_comes_to_the_host_has_arrived() -> None:
    """A copy from a GPU that nobody waits for would be read before it is there."""
    gpu = torch.device("cuda", 0)
    batch = [torch.ones(2), torch.nn.utils.rnn.pack_sequence([torch.ones(2)])]
    with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:  # tensors that know where they would be
        on_gpu = to_device(batch, gpu)
        assert copies.non_blocking == [True, True]
        copies.non_blocking.clear()
        assert to_device(on_gpu, torch.device("cpu"))[0].device.type == "cpu"
    assert copies.non_blocking == [False, False]


def test_on_a_cpu_batches_pass_one_by_one() -> None:
    taken: list[int] = []

    def batches() -> Any:
        for i in range(3):
            taken.append(i)
            yield i, torch.tensor(i)

    fed = feed(batches(), torch.device("cpu"))
    assert next(fed) == (0, torch.tensor(0))
    assert taken == [0], "nothing is read ahead of use"


@pytest.mark.gpu
@GPU
def test_on_a_gpu_a_batch_is_whole_when_it_is_used_and_is_not_overwritten() -> None:
    device = torch.device("cuda")
    work = torch.randn(2048, 2048, device=device)

    def batches() -> Any:
        for i in range(50):
            yield (
                i,
                {"rows": torch.full((1 << 20,), float(i)).pin_memory(), "self": Movable(torch.full((8,), float(i)))},
            )

    sums = []
    for i, batch in feed(batches(), device):
        assert batch["rows"].is_cuda
        assert batch["self"].rows.is_cuda
        for _ in range(5):  # the GPU is behind, and the copies of later batches are under way
            work = (work @ work).tanh()
        sums.append((i, batch["rows"].sum() + batch["self"].rows.sum() + 0 * work.sum()))
        del batch
    assert [float(total) for _, total in sums] == [i * ((1 << 20) + 8) for i, _ in sums]


@pytest.mark.gpu
@GPU
def test_on_a_gpu_the_memory_of_batches_serves_later_epochs() -> None:
    device = torch.device("cuda")
    reserved = []
    for _ in range(4):
        for _, rows in feed(((i, torch.ones(1 << 24).pin_memory()) for i in range(4)), device):
            assert rows.is_cuda
            del rows
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved(device))
    assert reserved[1:] == reserved[:1] * 3


@pytest.mark.gpu
@GPU
def test_on_a_gpu_a_loader_pins_and_copies_what_its_workers_read() -> None:
    strategy = unitrain.init(device="cuda", backend="single")
    loader = strategy.dataloader(list(range(100)), global_batch_size=8, num_workers=2, shuffle=True)
    seen = [sample for batch in loader for sample in batch.tolist() if batch.is_cuda]
    assert sorted(seen) == list(range(100))
