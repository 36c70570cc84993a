"""Text for language models, as bytes: each token is one of 256, and any text file will do."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from unitrain import ConfigError

VOCABULARY = 256
BEGIN = 0
"""The token before the first of a piece of text: a byte that no text has."""
IGNORED = -100
"""The target of a position that is padding; torch's cross-entropy leaves it out by default."""

_SUFFIXES = (".md", ".py", ".rst", ".txt")
_HELD_OUT = 10


class Text(NamedTuple):
    """Text in two parts: the last tenth of each document is for validation."""

    train: list[bytes]
    validation: list[bytes]


def load(name: str) -> Text:
    """Return the text that a name stands for.

    Args:
        name: ``docs`` for the topics of Python's ``help()``, ``stdlib`` for the source files of Python's standard
            library, or the path of a text file, or of a folder with .md, .py, .rst and .txt files.

    Raises:
        ConfigError: the path can't be read, or there is too little text to hold a part of it out.
    """
    if name == "docs":
        from pydoc_data.topics import topics

        documents = [topics[topic].encode() for topic in sorted(topics)]
    elif name == "stdlib":
        documents = _read(name, sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    else:
        documents = _read(name, _files(Path(name)))
    cuts = [len(document) - len(document) // _HELD_OUT for document in documents]
    train = [document[:cut] for document, cut in zip(documents, cuts, strict=True) if document]
    validation = [document[cut:] for document, cut in zip(documents, cuts, strict=True) if document[cut:]]
    if not validation:
        raise ConfigError(
            f"data {name} has {sum(map(len, documents))} bytes of text in {len(documents)} documents: too little to "
            f"hold a part out for validation. A document needs at least {_HELD_OUT} bytes."
        )
    return Text(train, validation)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    if not files:
        raise ConfigError(f"data {path} has no text: no file in this folder ends in {', '.join(_SUFFIXES)}.")
    return files


def _read(name: str, files: Sequence[Path]) -> list[bytes]:
    try:
        return [file.read_bytes() for file in files]
    except OSError as error:
        raise ConfigError(
            f"data {name} can't be read: {error}. It must be docs, stdlib, or the path of a text file or a folder."
        ) from None


def windows(pieces: Sequence[bytes], context: int) -> TensorDataset:
    """Return samples (window, length) in which each byte of each piece is predicted exactly once.

    A piece is cut into windows of ``context`` + 1 tokens, each of which begins with the last token of the one before.
    The last window of a piece is shorter than the others, and is padded.
    """
    rows, lengths = [], []
    for piece in pieces:
        tokens = torch.frombuffer(bytearray([BEGIN]) + piece, dtype=torch.uint8)
        for start in range(0, len(piece), context):
            window = tokens[start : start + context + 1]
            lengths.append(len(window) - 1)
            rows.append(torch.nn.functional.pad(window, (0, context + 1 - len(window))))
    return TensorDataset(torch.stack(rows), torch.tensor(lengths))


def inputs_and_targets(window: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a batch of windows, both (rows, context); padding has the target IGNORED."""
    inputs, targets = window[:, :-1].long(), window[:, 1:].long()
    positions = torch.arange(targets.shape[1], device=targets.device)
    return inputs, targets.masked_fill(positions >= length[:, None], IGNORED)


def baselines(text: Text) -> dict[str, float]:
    """Return the perplexities on the validation part of models that count: frequencies of bytes, and of pairs.

    Each byte counts once more than it was seen, and each pair more by the frequency of its second byte.
    """
    singles = torch.ones(VOCABULARY, dtype=torch.float64)
    pairs = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for before, after in map(_pairs, text.train):
        singles += torch.bincount(after, minlength=VOCABULARY)
        pairs += torch.bincount(before * VOCABULARY + after, minlength=VOCABULARY**2).view_as(pairs)
    singles /= singles.sum()
    pairs += singles
    singles, pairs = singles.log(), (pairs / pairs.sum(1, keepdim=True)).log()
    held_out = [_pairs(piece) for piece in text.validation]
    count = sum(len(after) for _, after in held_out)
    return {
        "unigram": math.exp(-sum(singles[after].sum().item() for _, after in held_out) / count),
        "bigram": math.exp(-sum(pairs[before, after].sum().item() for before, after in held_out) / count),
    }


def _pairs(piece: bytes) -> tuple[Tensor, Tensor]:
    tokens = torch.frombuffer(bytearray([BEGIN]) + piece, dtype=torch.uint8).long()
    return tokens[:-1], tokens[1:]
