"""What stands in the place of a checkpoint and is none: one message, and the checkpoint before it is taken."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from saved_run import SavedRun, described, folder_of, steps_in, verified
from torch import nn
from xxhash import xxh3_128_hexdigest

from unitrain import CheckpointError, Strategy, UsageError
from unitrain.checkpoint import Checkpoint
from unitrain.checkpoint.store.store import NAME as MANIFEST


def opened(strategy: Strategy, folder: Path, keep: int = 9) -> tuple[nn.Module, Checkpoint]:
    run = SavedRun(strategy, folder, keep=keep)
    return run.model, run.checkpoint


def save(strategy: Strategy, folder: Path, *steps: int) -> None:
    """Save a model whose weight is the step."""
    SavedRun(strategy, folder, keep=9).save(*steps).checkpoint.close()


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return what changes the manifest of a checkpoint, and gives it the digest that fits."""

    def apply(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        del manifest["digest"]
        change(manifest)
        digest = xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())
        (folder / MANIFEST).write_text(json.dumps({**manifest, "digest": digest}))

    return apply


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return apply


def of_no_torch(folder: Path) -> None:
    (folder / "model.pt").write_bytes(b"PK no file of torch's")
    described(folder)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: (folder / "model.pt").unlink(), r"step-0+2/model\.pt does not exist"),
    "cut": (lambda folder: os.truncate(folder / "model.pt", 9), r"step-0+2/model\.pt: 9 bytes instead of \d+"),
    "folder": (replaced("model.pt", os.mkdir), r"model\.pt: \d+ bytes instead of"),
    "manifest a list": (lambda folder: (folder / MANIFEST).write_text("[]"), r"manifest\.json: TypeError"),
    "manifest nested": (lambda folder: (folder / MANIFEST).write_text("[" * 10**6), r"manifest\.json: RecursionError"),
    "manifest binary": (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\0"), r"manifest\.json: JSONDecodeError"),
    "no files": (changed(lambda manifest: manifest.pop("files")), r"manifest\.json: files: Field required"),
    "odd size": (changed(lambda manifest: manifest["files"]["model.pt"].update(size="9")), r"model\.pt\.size: Input"),
    "outside": (changed(lambda manifest: manifest["files"].update({"../x.pt": {}})), r"files\.\.\./x\.pt"),
    "no schema": (changed(lambda manifest: manifest.pop("schema")), r"manifest\.json: KeyError: 'schema'"),
    "no run": (lambda folder: described(folder, without="_run.pt"), r"_run\.pt is missing"),
    "not torch's": (of_no_torch, r"model\.pt could not be read: "),
}


@pytest.mark.parametrize("case", SPOILED)
def test_the_checkpoint_before_is_taken(
    strategy: Strategy, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, said = SPOILED[case]
    save(strategy, tmp_path, 1, 2)
    spoil(folder_of(tmp_path, 2))
    model, checkpoint = opened(strategy, tmp_path, keep=1)
    assert checkpoint.resume()
    assert strategy.global_step == 1
    assert model.get_parameter("weight").item() == 1
    line, resumed = capsys.readouterr().err.splitlines()
    assert resumed == f"unitrain: resumed after step 1, from {folder_of(tmp_path, 1)}"
    assert line.startswith("unitrain: skipping a")
    assert re.search(said, line)
    # What was spoilt makes room, and nothing else does.
    strategy._step.global_step = 3
    checkpoint.save()
    assert steps_in(tmp_path) == [3]
    (folder_of(tmp_path, 3) / "model.pt").unlink()
    with pytest.raises(CheckpointError, match=r"all checkpoints .* are damaged"):
        checkpoint.resume()


def test_a_link_to_a_checkpoint_is_one_and_only_the_link_is_removed(strategy: Strategy, tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save(strategy, root, 1)
    folder_of(root, 1).rename(elsewhere)
    folder_of(root, 1).symlink_to(elsewhere)
    _, checkpoint = opened(strategy, root, keep=1)
    assert checkpoint.resume()
    strategy._step.global_step = 2
    checkpoint.save()
    assert steps_in(root) == [2]
    assert verified(elsewhere).step == 1


def test_a_checkpoint_that_can_not_be_removed_is_kept_and_reported(
    strategy: Strategy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(strategy, tmp_path, 1)
    first = str(folder_of(tmp_path, 1))
    if subprocess.run(["chattr", "+i", first], capture_output=True, check=False).returncode:  # even for root
        pytest.skip("the file system has no immutable files")
    try:
        _, checkpoint = opened(strategy, tmp_path, keep=1)
        assert checkpoint.resume()
        for step in (2, 3):
            strategy._step.global_step = step
            checkpoint.save()
        assert steps_in(tmp_path) == [3, 1]
        assert "an old checkpoint is kept: " in capsys.readouterr().err
        strategy._step.global_step = 1
        checkpoint.save()
        assert folder_of(tmp_path, 1).with_suffix(".2").is_dir()
        with pytest.raises(CheckpointError, match=r"step-0000000001 can't be removed: .*not permitted"):
            checkpoint.discard()
    finally:
        subprocess.run(["chattr", "-i", first], check=True)


def test_what_is_named_but_is_no_checkpoint_is_refused_with_what_to_name(strategy: Strategy, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(strategy, root, 1)
    (tmp_path / "file").write_text("")
    _, checkpoint = opened(strategy, root)
    remedy = rf"Name the folder of one checkpoint, {root}/step-N, or None for the newest in {root}\."
    cases: list[tuple[Path | str, str]] = [
        (root, r"contains checkpoints, such as step-0000000001, but is none itself"),
        (tmp_path, "is no checkpoint"),
        (tmp_path / "file", "is no checkpoint"),
        (root / "step-0000000001" / "model.pt", "is no checkpoint"),
        (root / "step-1", "does not exist"),
        ("", r"is no checkpoint"),
    ]
    for path, said in cases:
        with pytest.raises(CheckpointError, match=rf"{said}, so it can't be resumed from\. {remedy}"):
            checkpoint.resume(path)
    with pytest.raises(UsageError, match="is a URL that has lost a slash"):
        checkpoint.resume(Path("s3://bucket/run"))
    assert checkpoint.resume(str(root / "step-0000000001"))


@pytest.mark.parametrize("name", ["_run", "_feature.torchmetrics", "a/b", "", "a\0b"])
def test_a_name_that_is_none_of_a_file_is_refused(strategy: Strategy, tmp_path: Path, name: str) -> None:
    objects: dict[str, Any] = {name: {}}
    with pytest.raises(UsageError, match="can't be the name of an object"):
        strategy.checkpoint(tmp_path, **objects)
