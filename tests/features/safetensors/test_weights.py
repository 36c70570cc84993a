"""``load_weights``: a model of any backend, built on the meta device, gets the weights in files of other libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import unitrain
from unitrain import CheckpointError, UnitrainError
from unitrain.features.safetensors import load_weights
from unitrain.features.safetensors.loading import WeightFiles

safetensors = pytest.importorskip("safetensors.torch")
WORDS, WIDTH = 13, 6


class Model(nn.Module):
    """Has a tied weight, a scalar, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = x + block(x).relu()
        out: Tensor = self.head(self.norm(x) * self.scale)
        return out


def save(folder: Path, *, without: str = "head.weight") -> dict[str, Tensor]:
    """Save weights in bf16 as Hugging Face does: in two files, with an index, a tied weight once. Return them."""
    torch.manual_seed(7)
    state = {name: value.bfloat16() if value.dim() else value for name, value in Model().state_dict().items()}
    state.pop(without, None)
    names, index = sorted(state), {}
    for number, some in enumerate((names[:5], names[5:])):
        file = f"model-{number}.safetensors"
        safetensors.save_file({name: state[name].contiguous().clone() for name in some}, folder / file)
        index.update(dict.fromkeys(some, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return state


def load(backend: str, device: str, folder: str) -> dict[str, Tensor]:
    """Build a model, load its weights, and return them."""
    with unitrain.init(backend=backend, device="cpu", timeout_s=30) as strategy:
        with torch.device(device):
            model = Model()
        model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
        load_weights(strategy, model, folder)
        state = strategy.export(model).state_dict()
        words = torch.arange(12)
        for _ in range(2):
            strategy.step(cross_entropy(model(words), words), optimizer)
        assert not torch.equal(strategy.export(model).state_dict()["words.weight"], state["words.weight"])
        return state


@pytest.mark.parametrize(("backend", "world"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 3)])
def test_all_backends_load_what_hugging_face_would_have_saved(backend: str, world: int, tmp_path: Path) -> None:
    expected = save(tmp_path)
    device = "cpu" if world == 3 else "meta"
    for found in run_ranks(load, backend, device, str(tmp_path), nprocs=world):
        assert torch.equal(found["head.weight"], found["words.weight"])
        for name, weight in expected.items():
            assert torch.equal(found[name], weight.to(found[name].dtype)), name
        assert found["words.weight"].dtype == torch.float32


def load_wrong(folders: list[str]) -> list[str]:
    said = []
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        model = strategy.prepare(Model())
        before = strategy.export(model).state_dict()
        part = strategy.unwrap(model).get_submodule("norm")
        for module, folder in (*((model, folder) for folder in folders), (Model(), folders[0]), (part, folders[0])):
            with pytest.raises(UnitrainError) as error:
                load_weights(strategy, module, folder)
            said.append(str(error.value))
        assert all(map(torch.equal, strategy.export(model).state_dict().values(), before.values()))
        return said


def test_what_can_t_be_loaded_is_one_message_on_every_rank(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("empty", "other", "cut", "away")]
    for folder in folders:
        folder.mkdir()
    save(folders[1], without="norm.bias")
    safetensors.save_file({"words.weight": torch.ones(2), "body": torch.ones(1)}, folders[1] / "alone.safetensors")
    save(folders[2])
    cut = folders[2] / "model-1.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    (folders[3] / "model.safetensors.index.json").write_text('{"weight_map": {"words.weight": "../a.safetensors"}}')
    places = [*map(str, folders), str(tmp_path / "no"), str(folders[1] / "alone.safetensors"), "s3://bucket/model"]
    for said in run_ranks(load_wrong, places):
        empty, other, short, away, no, alone, url, unprepared, part = said
        assert "has neither model.safetensors nor model.safetensors.index.json" in empty
        assert "weights of another model: norm.bias is missing. Nothing was loaded" in other
        assert "model-1.safetensors is no whole file of safetensors: ValueError" in short
        assert "it names a file in another folder" in away
        assert "no does not exist" in no
        assert "body is not in the model; scale is missing; words.weight is (2,), but (13, 6) in the model; " in alone
        assert "and 11 more. Nothing was loaded" in alone
        assert "s3://bucket/model" in url
        assert "load_weights needs a prepared model" in unprepared
        assert "this BatchNorm1d is a part of a prepared one: pass what prepare() returned" in part


def test_a_changed_header_is_an_error_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bool)}, path)
    content = path.read_bytes()
    assert torch.equal(WeightFiles.at(path).whole("a"), torch.arange(6.0).view(2, 3))
    length = int.from_bytes(content[:8], "little")
    for position in range(8 + length):
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 7)
        path.write_bytes(changed)
        try:
            files = WeightFiles.at(path)
            found = files.forms()
        except CheckpointError:
            continue
        for name in found:
            files.whole(name).sum()  # its bytes are in the file


def test_models_of_transformers_are_built_without_weights_and_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    init_empty_weights = pytest.importorskip("accelerate").init_empty_weights
    transformers.utils.logging.disable_progress_bar()  # it leaves a thread
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    expected = transformers.LlamaForCausalLM(config)
    expected.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    with unitrain.init(backend="single", device="cpu") as strategy:
        with init_empty_weights():  # its tables of positions are buffers that no file has
            model = transformers.LlamaForCausalLM(config)
        model = strategy.prepare(model)
        load_weights(strategy, model, tmp_path)
        for (name, value), other in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
            assert torch.equal(value, other), name
        words = torch.arange(10)[None]
        assert torch.equal(model(words).logits, expected(words).logits)
