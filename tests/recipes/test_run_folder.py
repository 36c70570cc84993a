"""The folder of a recipe's run after a crash: what can be read is kept, and what can't be is reported."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import unitrain
from unitrain import ConfigError, Section
from unitrain.recipes.shared.run_folder import RunFolder

WHOLE = [json.dumps({"step": step, "loss": float("nan")}).encode() for step in (2, 4, 6)]


class Settings(Section):
    """Settings of a recipe."""


def begin(folder: Path, step: int) -> list[dict[str, float]]:
    """Begin a run in a folder, add a line, and return the lines of metrics."""
    with unitrain.init(backend="single", device="cpu") as strategy:
        run = RunFolder(strategy, folder, "test")
        run.begin(Settings(), step)
        run.add({"step": step + 1})
        run.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("broken", "reported"),
    [
        (b'{"step": 8, "lo', "line 4,"),
        (b'{"step"', "line 4,"),
        (b"\0" * 4096, "line 4,"),
        (b"\xff\xfe\x80", "line 4,"),
        (b"7\n[1]\n{}\nnull\n" + b'{"step": "7"}\n' + b"[" * 100_000, "lines 4, 5, 6, 7, 8, 9,"),
        (b"", ""),
        (b"\n\n", ""),
    ],
    ids=["cut", "cut in the name", "zeros", "binary", "no metrics", "whole", "blank"],
)
def test_a_line_that_was_cut_is_removed_and_reported(
    tmp_path: Path, broken: bytes, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*WHOLE, broken]))
    assert [line["step"] for line in begin(tmp_path, 4)] == [2, 4, 5]
    said = capsys.readouterr().err
    assert said.count("which can't be read") == bool(reported)
    assert f"removed {reported}" in said if reported else not said


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused(tmp_path: Path, make: object) -> None:
    make(tmp_path / "metrics.jsonl")  # type: ignore[operator]
    with (
        unitrain.init(backend="single", device="cpu") as strategy,
        pytest.raises(ConfigError, match=r"metrics\.jsonl is not a file\. Pass another"),
    ):
        RunFolder(strategy, tmp_path, "test")


def test_a_url_is_refused_and_no_folder_of_its_name_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        unitrain.init(backend="single", device="cpu") as strategy,
        pytest.raises(ConfigError, match=r"s3:/bucket/run is a URL, but .*: pass a folder as --output-dir"),
    ):
        RunFolder(strategy, Path("s3://bucket/run"), "test")
    assert not list(tmp_path.iterdir())


def test_floats_are_sent_to_the_trackers(tmp_path: Path) -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        run = RunFolder(strategy, tmp_path, "test")
        run.begin(Settings(), 0)
        for step in (1, 2):
            run.add({"step": step, "loss": 1 / step})
        run.close()
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("loss")] == [(1, 1.0), (2, 0.5)]
    assert shown.Tags()["scalars"] == ["loss"]
    with unitrain.init(backend="single", device="cpu") as strategy:
        run = RunFolder(strategy, tmp_path / "without", "test", trackers=())
        run.begin(Settings(), 0)
        run.close()
    assert {path.name for path in (tmp_path / "without").iterdir()} == {"config.yaml", "metrics.jsonl"}
