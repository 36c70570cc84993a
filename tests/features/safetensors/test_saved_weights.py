"""``save_weights``: files of safetensors that other libraries read, written by all ranks, each a part."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import unitrain
from unitrain import CheckpointError, UsageError
from unitrain.features.safetensors import load_weights, save_weights

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
LARGE, SMALL = 2**20, 3000  # bytes


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
        save_weights(strategy, prepared, folder, max_file_size=LARGE)
        files = [sorted(os.listdir(folder))]
        strategy.barrier()
        save_weights(strategy, prepared, folder, max_file_size=SMALL)
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
    files = {part: safetensors.load_file(tmp_path / part) for part in parts}
    assert about["weight_map"] == {name: part for part in parts for name in files[part]}
    assert about["metadata"]["total_size"] == sum(t.nbytes for tensors in files.values() for t in tensors.values())
    assert all(sum(t.nbytes for t in tensors.values()) <= SMALL or len(tensors) == 1 for tensors in files.values())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_are_saved_at_a_url() -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        model, other = strategy.prepare(nn.Linear(8, 8), nn.Linear(8, 8))
        save_weights(strategy, model, "memory://weights", max_file_size=100)
        load_weights(strategy, other, "memory://weights")
    assert torch.equal(model.weight, other.weight)


def save_apart(folder: str) -> list[str]:
    """Save where rank 1 sees another folder, then one that can't be written, and what safetensors can't hold."""
    said = []
    with unitrain.init(backend="fsdp", device="cpu", timeout_s=30) as strategy:
        os.chdir(Path(folder, str(strategy.rank)))
        model = strategy.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        save_weights(strategy, model, "out", max_file_size=100)
        said.append(" ".join(sorted(os.listdir("out"))) if Path("out").exists() else "")
        Path(folder, "file").touch()
        other = strategy.prepare(nn.Linear(2, 2, dtype=torch.complex64))
        for one, where, most in ((model, "file/out", 100), (model, "out", 0), (other, "out", 100)):
            with pytest.raises((CheckpointError, UsageError)) as raised:
                save_weights(strategy, one, Path(folder, where), max_file_size=most)
            said.append(str(raised.value))
    return said


def test_rank_0_writes_alone_what_others_do_not_see_and_failures_are_one_message(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    (seen, *errors), (unseen, *same) = run_ranks(save_apart, str(tmp_path))
    assert len(re.findall(r"model-\d+-of-00004\.safetensors", seen)) == 4
    assert unseen == ""
    assert errors == same
    assert re.search(r"weights can't be written to \S+file/out: .*Not a directory", errors[0])
    assert errors[1] == "save_weights: max_file_size is 0, but must be at least 1 byte."
    assert "weight is torch.complex64, torch.strided, which safetensors can't hold: use strategy.save" in errors[2]
