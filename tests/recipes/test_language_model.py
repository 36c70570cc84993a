"""The recipe that trains a language model: its data, its model, and the same training on one and two ranks."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from jobs import run_job
from needs import HOROVOD
from places import ROOT, TESTS
from ranks import run_ranks
from torch import Tensor
from tqdm import tqdm

from unitrain.communication.backend import backend_names
from unitrain.errors import ConfigError
from unitrain.recipes import language_model
from unitrain.recipes.text import data as text
from unitrain.recipes.text import gpt

RECIPES = ROOT / "recipes"
PROGRAM = TESTS / "programs" / "short_recipes.py"
# Of different lengths, so that the last sequences of the documents are, too.
DOCUMENTS = [f"Document {n}: " + "what is said here is said again, in other words. " * (15 + n) for n in range(6)]
SMALL = (
    "--data=texts", "--context=32", "--layers=2", "--width=16", "--heads=2", "--batch-size=7", "--warmup-epochs=0.1",
    "--sample=30",
)  # fmt: skip


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread stays for good
    Path("texts", "more").mkdir(parents=True)
    for number, document in enumerate(DOCUMENTS):
        Path("texts", "more" if number % 2 else "", f"{number}.txt").write_text(document)


def train(*flags: str) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Run the recipe in this process, and return the metrics and the weights."""
    sys.argv = ["language_model.py", "--output-dir=out", *SMALL, *flags]
    language_model.main()
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    weights: dict[str, Tensor] = torch.load("out/model.pt", weights_only=True)
    return lines, weights


# ------------------------------------------------------------------------------------------------------ training


@pytest.mark.all("test_launchers.py has a recipe under each launcher")
def test_ranks_train_the_same_model() -> None:
    """Their sequences hold different numbers of bytes, so equal weights for the ranks would show."""
    flags = ("--strategy.precision=fp64", "--max-steps=15", "--epochs=3", "--batch-size=15", "--resume=never")
    alone = run_ranks(train, *flags, nprocs=1, timeout=120)[0]
    starts: list[tuple[Literal["spawn", "horovodrun"], str, tuple[str, ...]]] = [
        ("spawn", "ddp", ()), ("spawn", "ddp", ("--strategy.accumulate=2",)),
        ("spawn", "fsdp", ("--strategy.backend=fsdp",)),
    ]  # fmt: skip
    if not HOROVOD.args[0]:
        starts.append(("horovodrun", "horovod", ()))
    for launcher, backend, more in starts:
        lines, weights = run_ranks(train, *flags, *more, launcher=launcher, timeout=120)[0]
        assert len(lines) > 1
        for line, expected in zip(lines, alone[0], strict=True):
            assert (line["world_size"], line["backend"]) == (2, backend)
            for name in ("step", "train_perplexity", "val_perplexity", "val_tokens"):
                assert line[name] == pytest.approx(expected[name], rel=1e-9, abs=0), (backend, more, name)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, alone[1][name], rtol=1e-9, atol=1e-11)


@pytest.mark.soak  # the test above, in the precision that most runs have
@HOROVOD
def test_ranks_train_the_same_model_in_float32() -> None:
    """Their losses, since each backend sums in its own order: 6e-8 was the most that was seen."""
    flags = ("--max-steps=30", "--epochs=3", "--resume=never")
    starts: list[tuple[str, Literal["spawn", "horovodrun"]]] = [
        ("ddp", "spawn"), ("fsdp", "spawn"), ("horovod", "horovodrun"),
    ]  # fmt: skip
    found = [
        run_ranks(train, *flags, f"--strategy.backend={backend}", launcher=launcher, timeout=120)[0][0]
        for backend, launcher in starts
    ]
    for lines in found[1:]:
        for line, expected in zip(lines, found[0], strict=True):
            for name in ("train_perplexity", "val_perplexity"):
                assert math.log(line[name]) == pytest.approx(math.log(expected[name]), abs=1e-6), name


def test_a_run_writes_resumes_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    lines, _ = train("--epochs=12", "--lr=0.02", "--max-steps=30", "--strategy.precision=bf16")
    printed = capsys.readouterr().out
    assert "perplexity of models that count bytes" in printed
    assert "---- a sample ----\nThe " in printed
    lines, _ = train(
        "--epochs=12", "--lr=0.02", "--strategy.precision=bf16"
    )  # goes on where it stopped, within an epoch
    printed, resumed = capsys.readouterr()
    assert "resumed after step 30" in resumed
    assert f"best validation perplexity {min(line['val_perplexity'] for line in lines):.3f}" in printed
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    held_out = text.load("texts").validation
    assert lines[-1]["val_tokens"] == sum(map(len, held_out))
    assert lines[-1]["val_perplexity"] < 0.7 * text.baselines(text.load("texts"))["unigram"]
    assert Path("out/best.pt").exists()


@pytest.mark.soak
@pytest.mark.parametrize("start", ["torchrun", pytest.param("mpirun", marks=HOROVOD)])
@pytest.mark.launcher
@pytest.mark.usefixtures("forked")
def test_the_defaults_run_under_launchers(tmp_path: Path, start: str) -> None:
    """This recipe's and those of the custom trainer."""
    command = {
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2"],
        "mpirun": ["mpirun", "--oversubscribe", "-np", "2", "python"],
    }[start]
    job = run_job([*command, str(PROGRAM), str(tmp_path)], tmp_path)
    assert job.code == 0, job.output
    assert job.left == ()
    (line,) = (tmp_path / "language_model" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    backend = {"torchrun": "ddp", "mpirun": "horovod"}[start]
    assert (metrics["step"], metrics["launcher"], metrics["backend"]) == (3, start, backend)
    assert job.stdout.count("bytes for training") == job.stdout.count("---- a sample ----") == 1, job.output
    (line,) = (tmp_path / "custom_trainer" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["val_accuracy"] > 0.5


# ------------------------------------------------------------------------------------------------------ the script


@pytest.mark.parametrize("name", ["language_model", "custom_trainer"])
def test_recipes_are_short_and_name_no_backend(name: str) -> None:
    source = (RECIPES / f"{name}.py").read_text()
    assert len([line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]) <= 150
    assert not {*backend_names()} & {*source.replace('"', " ").replace(".", " ").split()}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--data=nowhere",), "data nowhere can't be read: .*It must be docs, stdlib, or the path of a text file"),
        (("--data=empty",), "data empty has no text: no file in this folder ends in .md, .py, .rst, .txt."),
        (("--data=short.txt",), "data short.txt has 9 bytes of text in 1 documents: too little"),
        (("--heads=3",), "the width is 16, but must be a multiple of the number of heads, 3."),
        (("--epochs=1", "--warmup-epochs=2"), "warm-up takes .* steps, but training has only"),
        (("--dropout=1",), "--dropout is '1'"),
    ],
)
def test_what_can_not_be_is_refused(flags: tuple[str, ...], said: str) -> None:
    Path("empty").mkdir()
    Path("short.txt").write_text("nine byte")
    with pytest.raises(ConfigError, match=said):
        train(*flags)
    assert not Path("out").exists()


# --------------------------------------------------------------------------------------------------------- text


def test_each_byte_is_predicted_once() -> None:
    pieces = [b"abcdefgh", b"i", b"jklm"]
    window, length = text.windows(pieces, 4).tensors
    assert length.tolist() == [4, 4, 1, 4]
    inputs, targets = text.inputs_and_targets(window, length)
    assert bytes(targets[targets != text.IGNORED].tolist()) == b"abcdefghijklm"
    assert [bytes(row.tolist()) for row in inputs] == [b"\0abc", b"defg", b"\0i\0\0", b"\0jkl"]


def test_the_last_tenth_of_each_document_is_held_out() -> None:
    found = text.load("texts")
    assert sorted(a + b for a, b in zip(found.train, found.validation, strict=True)) == sorted(
        document.encode() for document in DOCUMENTS
    )
    assert all(len(b) == (len(a) + len(b)) // 10 for a, b in zip(found.train, found.validation, strict=True))


def test_the_data_that_python_has() -> None:
    assert sum(map(len, text.load("docs").train)) > 300_000
    assert any(b"class ArgumentParser" in piece for piece in text.load("stdlib").train)


def test_baselines_are_those_of_counting() -> None:
    given = text.Text([b"abab", b"ba"], [b"ab"])
    singles = Counter({"a": 3 + 1, "b": 3 + 1})
    total = 6 + 256
    pairs = {("\0", "a"): 1, ("\0", "b"): 1, ("a", "b"): 2, ("b", "a"): 2}
    chance = [(pairs[pair] + singles[pair[1]] / total) / (2 + 1) for pair in (("\0", "a"), ("a", "b"))]
    assert text.baselines(given) == {
        "unigram": pytest.approx(math.exp(-math.log(singles["a"] / total * singles["b"] / total) / 2)),
        "bigram": pytest.approx(math.exp(-math.log(chance[0] * chance[1]) / 2)),
    }


# -------------------------------------------------------------------------------------------------------- model


def test_a_prediction_depends_on_what_came_before_only() -> None:
    model = gpt.GPT(vocabulary=20, context=8, layers=2, width=16, heads=4, dropout=0.0)
    first = torch.randint(20, (3, 8), generator=torch.Generator().manual_seed(0))
    other = first.clone()
    other[:, 5] = (other[:, 5] + 1) % 20
    before, after = model(first), model(other)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    assert model.head.weight is model.tokens.weight
    assert F.cross_entropy(before.flatten(0, 1), first.flatten()).item() == pytest.approx(math.log(20), rel=0.1)


def test_only_matrices_decay() -> None:
    model = gpt.GPT(vocabulary=20, context=8, layers=1, width=16, heads=4, dropout=0.0)
    decaying, others = gpt.parameter_groups(model, 0.1)
    counts = [len(group["params"]) for group in (decaying, others)]
    assert sum(counts) == len(list(model.parameters()))
    assert (decaying["weight_decay"], others["weight_decay"], counts[0]) == (0.1, 0.0, 6)


def test_a_sample_is_drawn_by_its_seed_with_a_moving_context() -> None:
    model = gpt.GPT(vocabulary=20, context=4, layers=1, width=16, heads=4, dropout=0.5)
    one, again, other = (gpt.generate(model, [1], 12, seed=seed) for seed in (0, 0, 1))
    assert one == again != other
    assert len(one) == 12
