"""State that is broadcast in small buffers: the same bits on every rank, in the same memory, whatever the tensors."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from needs import HOROVOD
from ranks import on_ranks
from torch import Tensor, nn

import unitrain
from unitrain.communication import state_transfer
from unitrain.communication.state_transfer import SentState, broadcast_tensors, outline

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def tensors(rank: int) -> list[Tensor]:
    """Return tensors of every kind, whose elements depend on the rank."""
    drawn = torch.randint(2, (7, 3, 5, 11), generator=torch.Generator().manual_seed(rank))
    return [
        *(drawn[0].to(dtype) for dtype in DTYPES),
        drawn.float().contiguous(memory_format=torch.channels_last),
        drawn.double()[::2, 1:, :, ::3],  # with gaps
        drawn.bfloat16().permute(3, 0, 2, 1),
        torch.tensor(rank),
        torch.empty(0, 3),
        torch.full((1, 1, 1000), float(rank)),
    ]


@pytest.mark.parametrize("size", [100, 2**20])
@pytest.mark.parametrize(("backend", "nprocs"), [("ddp", 3), pytest.param("horovod", 2, marks=HOROVOD)])
@on_ranks()
def test_tensors_of_every_kind_become_rank_0_s_bit_for_bit(backend: str, nprocs: int, size: int) -> None:
    state_transfer.BUFFER_BYTES = size
    with unitrain.init(backend=backend, device="cpu") as strategy:
        own, expected = tensors(strategy.rank), tensors(0)
        strides = [tensor.stride() for tensor in own]
        broadcast_tensors(strategy.communicator, own, own)
        assert [tensor.stride() for tensor in own] == strides
        assert strategy.world_size == nprocs
        for one, other in zip(own, expected, strict=True):
            in_bytes = one.dtype == torch.float8_e4m3fn  # which torch can't compare
            assert torch.equal(*(x.view(torch.uint8) if in_bytes else x for x in (one, other))), one.dtype


@on_ranks()
def test_nested_state_keeps_its_structure_and_uses_the_memory_of_the_receiver() -> None:
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        main = strategy.is_main
        value: Any = OrderedDict(a=[torch.arange(3.0), ("text", None)], b={7: (torch.ones(()), 2**70)})
        value._metadata = {"": {"version": 2}}
        expected = strategy.communicator.broadcast_object(outline(value))
        memory = torch.zeros(3)
        own = {"a": [memory, 0], "b": {7: (torch.ones(1),)}}  # the second has another shape
        made = SentState(strategy.communicator, expected, value if main else None).receive(into=own)
        assert made["a"][0] is memory
        assert memory.tolist() == [0, 1, 2]
        assert made["b"][7][0].shape == ()
        assert type(made) is OrderedDict
        assert made._metadata == {"": {"version": 2}}  # type: ignore[attr-defined]
        assert (made["a"][1], made["b"][7][1]) == (("text", None), 2**70)


def test_a_new_tensor_has_the_memory_format_of_its_source() -> None:
    weight = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    made = outline(weight).empty(torch.device("cpu"))
    assert made.stride() == weight.stride()
    assert outline(weight[:, :2]).empty(torch.device("cpu")).is_contiguous(memory_format=torch.channels_last)


def test_a_tensor_that_overlaps_itself_is_not_written_to() -> None:
    assert not outline(torch.ones(3)).fits(torch.zeros(1).expand(3))
    assert outline(torch.ones(1, 3)).fits(torch.zeros(3).expand(1, 3))
    assert not outline(torch.ones(2)).fits(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("value", [nn.Parameter(torch.ones(2)), torch.ones(2).to_sparse(), 3, None, "text"], ids=str)
def test_what_a_form_can_not_describe_is_sent_with_the_outline(value: Any) -> None:
    assert outline({"a": [value]})["a"][0] is value
