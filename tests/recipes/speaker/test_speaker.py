"""The speaker recogniser under three launchers: it trains the same network, and wrong data is one message."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import forked_python
import needs
import pytest
import torch
from jobs import RECIPE, Job, run_job
from tqdm import tqdm

from unitrain import ConfigError
from unitrain.communication.backend import backend_names
from unitrain.recipes import speaker
from unitrain.recipes.speaker_verification import synthesis as speaker_synthesis
from unitrain.recipes.speaker_verification.losses import LossName

SPEAKER = RECIPE.with_name("speaker.py")
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")
MPIRUN = ("mpirun", "--oversubscribe", "-np", "2", "python")
# 6 batches of an epoch, with 3 utterances of 2 speakers each.
SMALL = "--data voxceleb:speech --seconds 0.2 --test-seconds 0.2 --test-crops 2 --batch-size 6 --epochs 2"
EXACT = "--utterances-per-speaker 3 --strategy.precision fp64 --strategy.sync-batchnorm true"
METRICS = ("epoch", "step", "train_loss", "eer", "min_dcf", "learning_rate")


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "speech"
    speaker_synthesis.make(folder, train=(4, 9), test=(4, 3))
    return folder


@pytest.fixture
def folder(speech: Path, tmp_path: Path) -> Path:
    """Where the recipe is run: the data are in ``speech``."""
    (tmp_path / "speech").symlink_to(speech)
    return tmp_path


def train(start: Sequence[str], folder: Path, flags: str) -> Job:
    job = run_job([*start, str(SPEAKER), *SMALL.split(), *flags.split(), "--output-dir", "out"], folder)
    assert job.left == ()
    return job


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_it_is_short_and_names_no_backend() -> None:
    source = SPEAKER.read_text()
    assert len([line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]) <= 150
    assert not re.search(rf"\b({'|'.join(backend_names())})\b", source)


@pytest.fixture(scope="module")
def alone(speech: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "speech").symlink_to(speech)
    with pytest.MonkeyPatch.context() as monkeypatch:
        forked_python.use(monkeypatch)
        job = train(["python"], folder, EXACT)
    assert job.code == 0, job.output
    found = metrics(folder)
    assert [[line[name] for name in ("epoch", "step", "backend")] for line in found] == [
        [-1, 0, "single"],
        [0, 6, "single"],
        [1, 12, "single"],
    ]
    assert "untrained: equal error rate" in job.stdout
    assert "epoch 1: loss" in job.stdout
    assert "training is complete" not in job.stdout
    assert (folder / "out" / "curves.png").exists()
    return found


@pytest.mark.all("test_launchers.py has a recipe under each launcher")
@pytest.mark.launcher
@needs.HOROVOD
@pytest.mark.skipif(shutil.which("mpirun", path=Path(sys.executable).parent) is None, reason="mpirun can't be found")
@pytest.mark.usefixtures("forked")
def test_it_trains_the_same_network_on_two_processes_and_continues_under_another_launcher(
    folder: Path, alone: list[dict[str, Any]]
) -> None:
    job = train(TORCHRUN, folder, f"{EXACT} --max-steps 4")
    assert job.code == 0, job.output
    job = train(MPIRUN, folder, EXACT)
    assert job.code == 0, job.output
    assert "resumed after step 4" in job.output
    found = metrics(folder)
    assert [(line["step"], line["launcher"], line["backend"], line["world_size"]) for line in found] == [
        (0, "torchrun", "ddp", 2),
        (4, "torchrun", "ddp", 2),
        (6, "mpirun", "horovod", 2),
        (12, "mpirun", "horovod", 2),
    ]
    for one, other in ((found[0], alone[0]), (found[3], alone[2])):
        for name in METRICS:
            if name in other:
                assert one[name] == pytest.approx(other[name], rel=1e-9, abs=0), name


class Recipe:
    """Runs the recipe's main in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.chdir(folder)
        monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread stays for good

    def __call__(self, flags: str) -> None:
        command = ["speaker.py", *SMALL.split(), *flags.split(), "--output-dir", "out"]
        self._monkeypatch.setattr(sys, "argv", command)
        speaker.main()


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Recipe:
    return Recipe(monkeypatch, folder)


def test_every_flag_is_in_the_help(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        recipe("--help")
    printed = capsys.readouterr().out
    for flag in ("loss", "data", "train-list", "trial-list", "utterances-per-speaker", "most-per-speaker", "lr"):
        assert f"--{flag} " in printed
    for loss in get_args(LossName):
        assert loss in printed


@pytest.mark.parametrize("loss", ["softmax", "aamsoftmax"])
def test_classifiers_train_with_one_utterance_per_speaker(recipe: Recipe, folder: Path, loss: str) -> None:
    recipe(f"--loss {loss} --utterances-per-speaker 1 --batch-size 4 --max-steps 2")
    assert [line["step"] for line in metrics(folder)] == [0, 2]
    assert torch.load(folder / "out" / "model.pt", weights_only=True).keys() >= {"fc.weight", "pool.hidden.weight"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--batch-size 7", "the batch size is 7, but must be a multiple of 2, the utterances per speaker"),
        ("--batch-size 12", "a batch of 12 needs 6 speakers with at least 2 utterances, but the training set has 4"),
        ("--utterances-per-speaker 1 --batch-size 4", "loss angleproto compares .* needs at least 2 utterances"),
        ("--strategy.accumulate 2", "loss angleproto compares all speakers of a batch: set strategy.accumulate to 1"),
        ("--trial-list nowhere.txt", "the list speech/nowhere.txt can't be read"),
        ("--trial-list ../absent.txt", "1 of the 2 files named in .*absent.txt don't exist, the first is .*b.wav"),
        ("--trial-list train_list.txt", "train_list.txt, line 1 is .*, but must be LABEL PATH PATH"),
        ("--data voxceleb", "--data is 'voxceleb', but must be synthetic or voxceleb:PATH"),
        ("--loss triplet", "--loss is 'triplet', but must be softmax, amsoftmax"),
    ],
)
def test_what_can_not_be_is_refused(recipe: Recipe, folder: Path, flags: str, said: str) -> None:
    absent = folder.joinpath("speech").resolve().parent / "absent.txt"  # ".." of a link is its target's
    absent.write_text("1 id00004/video0/00000.wav id00004/video0/00000.wav\n0 id00004/video0/00000.wav b.wav\n")
    with pytest.raises(ConfigError, match=said):
        recipe(flags)
    assert not (folder / "out").exists()


@pytest.mark.soak
@pytest.mark.launcher
def test_a_missing_file_is_one_message_of_all_ranks(folder: Path) -> None:
    (folder / "trials.txt").write_text("1 id00004/video0/00000.wav id00004/video0/99999.wav\n0 a.wav b.wav\n")
    job = train(TORCHRUN, folder, f"--trial-list {folder / 'trials.txt'}")
    assert job.code != 0
    said = "3 of the 4 files named in .*/trials.txt don't exist, the first is .*id00004/video0/99999.wav"
    assert len(re.findall(f"unitrain: error: .*{said}", job.stderr)) == 1, job.output
    assert not (folder / "out").exists()
