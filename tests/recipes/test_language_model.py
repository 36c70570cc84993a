"""The recipe that trains a language model: its data, its model, and what a run writes."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from needs import HOROVOD
from ranks import run_ranks
from recipe_runs import DOCUMENTS, run_recipe, write_documents

from unitrain.errors import ConfigError
from unitrain.recipes.text import data as text
from unitrain.recipes.text import gpt

SMALL = (
    "--data=texts", "--context=32", "--layers=2", "--width=16", "--heads=2", "--batch-size=7", "--warmup-epochs=0.1",
    "--sample=30",
)  # fmt: skip


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with texts."""
    monkeypatch.chdir(tmp_path)
    write_documents(Path("texts"))


def test_a_run_writes_resumes_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*SMALL, "--epochs=12", "--lr=0.02", "--strategy.precision=bf16")
    run_recipe("language_model", *flags, "--max-steps=30")
    printed = capsys.readouterr().out
    assert "perplexity of models that count bytes" in printed
    assert "---- a sample ----\nThe " in printed
    lines = run_recipe("language_model", *flags)  # goes on where it stopped, within an epoch
    printed, resumed = capsys.readouterr()
    assert "resumed after step 30" in resumed
    assert f"best validation perplexity {min(line['val_perplexity'] for line in lines):.3f}" in printed
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    held_out = text.load("texts").validation
    assert lines[-1]["val_tokens"] == sum(map(len, held_out))
    assert lines[-1]["val_perplexity"] < 0.7 * text.baselines(text.load("texts"))["unigram"]
    assert Path("out/best.pt").exists()


def train(output: Path, backend: str, *stops: tuple[int, int]) -> dict[str, Any]:
    """Train in float64 up to each number of steps, with so many ranks that share each text. Return the last metrics."""
    os.chdir(output.parent)
    flags = (*SMALL, "--context=33", "--epochs=2", "--strategy.precision=fp64", f"--strategy.backend={backend}")
    for steps, ranks in stops:
        lines = run_recipe(
            "language_model", *flags, f"--max-steps={steps}", f"--strategy.ranks-per-batch={ranks}", output=output
        )
    return lines[-1]


LATER = pytest.mark.all("test_launchers.py has ranks that share each text, without a resume")


@pytest.mark.parametrize(
    "backend",
    ["ddp", pytest.param("fsdp", marks=LATER), pytest.param("horovod", marks=[LATER, HOROVOD])],
)
def test_ranks_share_each_text_and_resume_with_others(tmp_path: Path, backend: str) -> None:
    # Halves of 17 and 16 tokens, and in the last window of a document, one that is empty.
    line = run_ranks(train, tmp_path / "shared", backend, (5, 2), (9, 1), (14, 2))[0]
    expected = run_ranks(train, tmp_path / "alone", "single", (14, 1), nprocs=1, launcher="python")[0]
    for value in ("step", "val_perplexity", "val_tokens"):
        assert line[value] == pytest.approx(expected[value], rel=1e-9), value
    weights, expected_weights = (
        torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("shared", "alone")
    )
    for key, weight in expected_weights.items():
        torch.testing.assert_close(weights[key], weight, rtol=1e-9, atol=1e-11)


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
        run_recipe("language_model", *SMALL, *flags)
    assert not Path("out").exists()


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
