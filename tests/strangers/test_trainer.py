"""The Trainer's section of docs/migrating/moving.md: the weights of Hugging Face's Trainer, on 1 and 2 processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from page_blocks import blocks
from places import ROOT
from ranks import run_ranks

State = dict[str, torch.Tensor]
PAGE = blocks(ROOT / "docs" / "migrating" / "moving.md")
[SECTION] = {block.section for block in PAGE if "transformers" in block.text}
BLOCKS = [block.text for block in PAGE if block.section == SECTION]
# transformers' losses are in float32.
EXACT = 1e-7


class Trained(NamedTuple):
    """What the page has trained: weights, the last mean loss, weights with an adapter."""

    weights: State
    loss: float
    adapted: State


def by_the_page(folder: str, backend: str) -> Trained:
    """Run the page in float64 and in the order of the data."""
    os.makedirs(f"{folder}/{backend}", exist_ok=True)
    os.chdir(f"{folder}/{backend}")
    settings = f'backend="{backend}", precision="fp64", device="cpu", '
    names: dict[str, Any] = {}
    for text in BLOCKS:
        text = text.replace("unitrain.init(", f"unitrain.init({settings}").replace("shuffle=True, ", "")
        exec(compile(text, "page", "exec", dont_inherit=True), names)
    adapted = names["adapted"].state_dict()
    if names["strategy"].is_main:  # which has loaded what it has saved
        loaded = {name: value for name, value in names["tuned"].state_dict().items() if "lora" in name}
        assert difference(loaded, {name: adapted[name] for name in loaded}) < EXACT
    trained = Trained(names["whole"].state_dict(), names["losses"].value(), adapted)
    names["strategy"].close()
    return trained


def on_two(folder: str) -> list[Trained]:
    return [by_the_page(folder, backend) for backend in ("ddp", "fsdp")]


def by_the_trainer(folder: str) -> tuple[State, Trained]:
    """Return the weights that the Trainer has trained, and what the page has, both in this process."""
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: object) -> Any:
            return SequentialSampler(self.train_dataset)

    ours = by_the_page(folder, "single")
    names: dict[str, Any] = {}
    exec(BLOCKS[0], names)
    set_seed(42)
    model = AutoModelForCausalLM.from_config(names["config"]).double()
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=3, weight_decay=0.1,
        warmup_steps=1, use_cpu=True, report_to=[], save_strategy="no", remove_unused_columns=False, disable_tqdm=True,
    )  # fmt: skip
    InOrder(model, arguments, train_dataset=names["rows"], data_collator=names["collate"]).train()
    return model.state_dict(), ours


def difference(one: State, other: State) -> float:
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.all("test_run_clm.py trains a model of transformers")
def test_the_page_trains_what_the_trainer_trains(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    [(theirs, ours)] = run_ranks(by_the_trainer, str(tmp_path), nprocs=1, timeout=120, fresh=True)
    assert difference(theirs, ours.weights) < EXACT
    for found in run_ranks(on_two, str(tmp_path), timeout=120, fresh=True)[0]:
        assert difference(found.weights, ours.weights) < EXACT
        assert difference(found.adapted, ours.adapted) < EXACT
        assert found.loss == pytest.approx(ours.loss, rel=EXACT)
