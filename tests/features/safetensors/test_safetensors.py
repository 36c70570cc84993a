"""``load_weights`` and ``save_weights``: files that other libraries write and read, for a model of any backend."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import unitrain
from unitrain import UnitrainError
from unitrain.features.safetensors import load_weights, save_weights, weights

transformers = pytest.importorskip("transformers")
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
        save_file({name: state[name].contiguous().clone() for name in some}, folder / file)
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
    folders = [tmp_path / name for name in ("empty", "other", "cut")]
    for folder in folders:
        folder.mkdir()
    save(folders[1], without="norm.bias")
    save_file({"words.weight": torch.ones(2), "body": torch.ones(1)}, folders[1] / "alone.safetensors")
    save(folders[2])
    cut = folders[2] / "model-1.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    torch.save(Model().state_dict(), folders[1] / "model.pt")
    save_file({"module.words.weight": torch.ones(2)}, folders[1] / "wrapped.safetensors")
    names = ("alone.safetensors", "model.pt", "wrapped.safetensors")
    places = [*map(str, folders), *(str(folders[1] / name) for name in names), "s3://bucket/model"]
    for said in run_ranks(load_wrong, places):
        empty, other, short, alone, of_torch, wrapped, url, unprepared, part = said
        assert "/empty/model.safetensors.index.json: FileNotFoundError" in empty
        assert "weights of another model: norm.bias is missing. Pass the file of this model, or build" in other
        assert "model.safetensors.index.json: SafetensorError" in short
        assert "body is not in the model; scale is missing; words.weight is [2], but [13, 6] in the model; " in alone
        assert "and 11 more. Pass" in alone
        assert "What torch.save has written is loaded before prepare()" in of_torch
        assert "Names with module. or _orig_mod. are a wrapped model's: save its weights without" in wrapped
        assert "weights can't be read from s3:/bucket/model: FileNotFoundError" in url
        assert unprepared == part == "load_weights fills a whole prepared model: pass what prepare() returned."


def test_models_of_transformers_are_built_without_weights_and_loaded(tmp_path: Path) -> None:
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


SMALL = 3000  # bytes


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def save_and_load(backend: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[list[str]]]:
    """Save a model twice, in one file and in several, and load it."""
    transformers.utils.logging.disable_progress_bar()
    with unitrain.init(backend=backend, device="cpu", timeout_s=30) as strategy:
        model = llama()
        if strategy.is_main:
            model.config.save_pretrained(folder)  # type: ignore[operator, union-attr]
        prepared = strategy.prepare(model)
        expected = strategy.export(prepared).state_dict()
        save_weights(strategy, prepared, folder)
        files = [sorted(os.listdir(folder))]
        strategy.barrier()
        with patch.object(weights, "_FILE_BYTES", SMALL):
            save_weights(strategy, prepared, folder)
        files.append(sorted(os.listdir(folder)))
        with torch.no_grad():
            for parameter in prepared.parameters():
                parameter.zero_()
        load_weights(strategy, prepared, folder)
        return expected, strategy.export(prepared).state_dict(), files


@pytest.mark.parametrize(
    ("backend", "world"), [("ddp", 2), ("fsdp", 2), pytest.param("fsdp", 3, marks=pytest.mark.soak)]
)
def test_transformers_reads_what_the_ranks_have_written(backend: str, world: int, tmp_path: Path) -> None:
    transformers.utils.logging.disable_progress_bar()  # it leaves a thread
    for expected, loaded, (whole, divided) in run_ranks(save_and_load, backend, str(tmp_path), nprocs=world):
        assert expected.keys() == loaded.keys()
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
        assert [name for name in whole if "safetensors" in name] == ["model.safetensors"]
        *parts, index = [name for name in divided if "safetensors" in name]
        assert index == "model.safetensors.index.json"
        assert parts == [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    assert len(parts) > 3
    about = json.loads((tmp_path / index).read_text())
    files = {part: load_file(tmp_path / part) for part in parts}
    assert about["weight_map"] == {name: part for part in parts for name in files[part]}
    assert about["metadata"]["total_size"] == sum(t.nbytes for tensors in files.values() for t in tensors.values())
    assert all(sum(t.nbytes for t in tensors.values()) <= SMALL or len(tensors) == 1 for tensors in files.values())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert model.lm_head.weight is model.model.embed_tokens.weight


def save_wrong(folder: str) -> list[str]:
    said = []
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        model = strategy.prepare(nn.Linear(8, 8))
        for where in (f"{folder}/file/out", "s3://bucket/out"):
            with pytest.raises(UnitrainError) as raised:
                save_weights(strategy, model, where)
            said.append(str(raised.value))
    return said


def test_what_can_t_be_written_is_one_message_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for not_a_folder, url in run_ranks(save_wrong, str(tmp_path)):
        assert re.search(r"/file/out can't be written: .*Not a directory", not_a_folder)
        assert url == "s3://bucket/out is a URL, but save_weights writes to a folder: pass a path."
