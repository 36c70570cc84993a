"""Data that ranks send to one another without pickling them, and what is sent instead of them."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from unitrain.communication.plain_data import NotPlainError, decode, encode
from unitrain.communication.state_transfer import Form

Point = namedtuple("Point", "x y")


def sent(value: Any) -> Any:
    """Return a value after it was sent."""
    return decode(encode(value))


PLAIN: list[Any] = [
    None, True, 2**70, 0.1, -math.inf, "é\n\ud800", b"\x00\xff", 1 + 2j, [], (), {}, [1, [2, (3, None)]],
    {1: "a", (2, "b"): [None], None: 1.5, "tensor": {"dict": 3}}, OrderedDict(b=1, a=2), torch.Size([2, 3]),
    torch.device("cuda", 3), torch.bfloat16,
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN)
def test_what_is_plain_is_the_same_afterwards(value: Any) -> None:
    received = sent(value)
    assert received == value
    assert type(received) is type(value)


TENSORS = [
    torch.tensor(1.5), torch.arange(6).view(2, 3).t(), torch.zeros(0, 3), torch.tensor([True, False]),
    torch.tensor([1.5, math.nan], dtype=torch.bfloat16), torch.tensor([1 + 2j]).conj(),
    torch.arange(300, dtype=torch.int16)[::7],
]  # fmt: skip


@pytest.mark.parametrize("tensor", TENSORS)
def test_tensors(tensor: Tensor) -> None:
    received = sent({"a": [tensor]})["a"][0]
    assert received.dtype == tensor.dtype
    assert torch.equal(received.isnan(), tensor.isnan())
    assert torch.equal(received.nan_to_num(), tensor.nan_to_num())


def test_a_state_dict_keeps_the_versions_of_its_modules() -> None:
    state = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)).state_dict()
    received = sent(state)
    assert list(received) == list(state)
    assert received._metadata == state._metadata  # type: ignore[attr-defined]


def test_the_form_of_a_tensor() -> None:
    form = Form(torch.ones(2, 3, 4, 5, dtype=torch.float16).to(memory_format=torch.channels_last))
    received = sent([form])[0]
    assert vars(received) == vars(form)


INFINITE: list[Any] = []
INFINITE.append(INFINITE)
DEEP = reduce(lambda inner, _: [inner], range(100_000), list[Any]())
NOT_PLAIN: list[Any] = [
    object(), Point(1, 2), np.float64(1.0), {1, 2}, [nn.Parameter(torch.ones(1))], torch.ones(1, requires_grad=True),
    torch.ones(1).to_sparse(), torch.ones(1, device="meta"), 10**5000,
]  # fmt: skip


@pytest.mark.parametrize("value", [*NOT_PLAIN, INFINITE, DEEP], ids=lambda value: type(value).__name__)
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(NotPlainError):
        encode(value)


HOSTILE = [
    b"", b"{", b"\xff", b"[" * 100_000, b"{}", b'{"unknown":1}', b'{"tensor":1}', b'{"tensor":["float32",[-1]]}',
    b'{"tensor":["float32",[1e9]]}', b'{"tensor":["float32",[1000000000000000]]}',
    b'{"tensor":["float32",[' + b"9" * 40 + b"]]}", b'{"tensor":[[],[]]}', b'{"bytes":"zz"}', b'{"complex":[1,2,3]}',
    b'{"tuple":3}', b'{"tuple":{"tensor":["uint8",[0]]}}', b'{"dict":[1]}', b'{"dict":{"dict":[]}}',
    b'{"dict":[[[],1]]}', b'{"OrderedDict":[1]}', b'{"Size":["a"]}',
    b'{"device":"moon"}', b'{"dtype":"object"}', b'{"Form":[1]}',
    b'{"Form":{"tuple":[{"tuple":[-1]},{"dtype":"float32"},{"tuple":[1]}]}}',
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: data[:40].decode(errors="replace"))
def test_what_strangers_may_send_instead(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(as_sent(data))


def as_sent(header: bytes, content: bytes = b"") -> Tensor:
    return torch.frombuffer(bytearray(len(header).to_bytes(8, "big") + header + content), dtype=torch.uint8)


@pytest.mark.parametrize("size", [0, 3, 5, 2**20])
def test_tensors_with_too_few_or_too_many_bytes(size: int) -> None:
    header = b'[{"tensor":["float32",[1]]}]'
    assert decode(as_sent(header, bytes(4)))[0].tolist() == [0.0]
    with pytest.raises(ValueError):
        decode(as_sent(header, bytes(size)))


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\0" * 7 + b"\5null", b"\xff" * 8 + b"null"])
def test_lengths_of_no_header(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(torch.tensor(list(data), dtype=torch.uint8))
