"""The ResNet recipe in one process: the files that it writes, its flags, and messages for wrong ones."""

from __future__ import annotations

import json
import math
import re
import socket
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from PIL import Image
from recipe_runs import run_recipe
from sklearn.datasets import load_digits

from unitrain.errors import ConfigError
from unitrain.recipes.image_classification import models

METRICS = {
    "epoch", "step", "train_loss", "val_loss", "val_accuracy", "val_top5_accuracy", "val_count", "learning_rate",
    "backend", "launcher", "world_size",
}  # fmt: skip
MEASURED = {
    "samples_per_second", "data_seconds", "step_seconds", "rest_seconds", "peak_memory_mb", "slowest_rank",
    "slowest_ratio",
}  # fmt: skip
# Three steps of an epoch; the validation set has 2 images.
FAKE = ("--data", "fake:20", "--batch-size", "8")
OUT = Path("out")
TORCHVISION = Path("torch", "hub", "checkpoints", "resnet18-f37072fd.pth")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


recipe = partial(run_recipe, "resnet")


def saved() -> dict[str, torch.Tensor]:
    """Return the weights that the last run saved."""
    state: dict[str, torch.Tensor] = torch.load(OUT / "model.pt", weights_only=True)
    return state


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Send every download to a port that refuses connections, and let none find what was downloaded before."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for scheme in ("http", "https"):
            monkeypatch.setenv(f"{scheme}_proxy", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setattr(urllib.request, "_opener", None)  # keeps the proxies that it found first
        monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
        yield


def test_models_are_those_of_torchvision_and_one_small_one() -> None:
    import torchvision

    names = torchvision.models.list_models(module=torchvision.models, include=["resnet*", "resnext*", "wide_resnet*"])
    assert {*get_args(models.ModelName)} == {*names, "resnet8"}
    assert models.build("resnet18", 7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert models.build("resnet8", 7)(torch.zeros(2, 3, 8, 8)).shape == (2, 7)


def test_an_epoch_is_a_line_of_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    lines = recipe(*FAKE, "--epochs", "2", "--lr", "0.05", "--warmup-epochs", "0")
    assert [set(line) for line in lines] == [METRICS | MEASURED, METRICS | MEASURED]
    assert [name for line in lines for name in MEASURED - {"slowest_rank"} if line[name] <= 0] == []
    assert [(line["epoch"], line["step"], line["val_count"]) for line in lines] == [(0, 3, 2), (1, 6, 2)]
    assert (lines[0]["backend"], lines[0]["launcher"], lines[0]["world_size"]) == ("single", "python", 1)
    # The rate of the epoch's last step.
    rates = [0.025 * (1 + math.cos(math.pi * step / 6)) for step in (2, 5)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates)
    printed = capsys.readouterr()
    for said in ("resnet8 on fake:20", "launcher python, backend single", "batch 8", "learning rate 0.05", "fp32"):
        assert printed.out.count(said) == 1, said
    assert f"results are in {OUT}" in printed.out
    assert "epoch 1:" not in printed.err, "no bar where it is not a terminal"


def test_a_prediction_is_the_best_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = recipe("--epochs", "3", "--max-steps", "60")
    for figure in ("curves.png", "confusion_matrix.png"):
        assert (OUT / figure).read_bytes().startswith(b"\x89PNG")
    assert json.loads((OUT / "class_indices.json").read_text()) == {str(i): str(i) for i in range(10)}
    assert lines[-1]["val_accuracy"] <= lines[-1]["val_top5_accuracy"] <= 1
    picture, answers = tmp_path / "digit.png", []
    for number in range(10):  # scikit-learn's first ten are the digits from 0 to 9
        pixels = load_digits().images[number]
        Image.fromarray((pixels * (255 / 16)).astype("uint8")).resize((80, 80), Image.Resampling.NEAREST).save(picture)
        capsys.readouterr()
        recipe("--predict", str(picture))
        printed = [line.split() for line in capsys.readouterr().out.splitlines()]
        probabilities = [float(probability.rstrip("%")) for probability, _ in printed]
        assert len(printed) == 5
        assert probabilities == sorted(probabilities, reverse=True)
        answers.append(printed[0][1])
    assert sum(answer == str(number) for number, answer in enumerate(answers)) >= 8
    recipe("--epochs", "3", "--evaluate")
    assert f"val_accuracy {lines[-1]['val_accuracy']:.4f}" in capsys.readouterr().out
    (OUT / "class_indices.json").unlink()
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        recipe("--predict", str(picture))


def test_the_written_settings_repeat_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNITRAIN_SEED", "7")
    first = recipe(*FAKE, "--epochs", "1", "--lr", "0.02", "--strategy.clip-norm", "1.0")
    written = OUT / "config.yaml"
    settings = yaml.safe_load(written.read_text())
    assert (settings["data"], settings["lr"], settings["strategy"]["seed"]) == ("fake:20", 0.02, 7)
    assert settings["strategy"]["clip_norm"] == 1.0
    monkeypatch.delenv("UNITRAIN_SEED")
    again = recipe("--config", str(written))
    assert [{name: line[name] for name in METRICS} for line in again] == [
        {name: line[name] for name in METRICS} for line in first
    ]
    assert yaml.safe_load(written.read_text()) == settings


def test_each_run_has_a_folder_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        run_recipe("resnet", *FAKE, "--max-steps", "1", output=None)
    folders = [folder for folder in Path("runs").iterdir() if re.fullmatch(r"resnet-\d{8}-\d{6}-\d+", folder.name)]
    assert len(folders) == 2
    printed = capsys.readouterr().out
    assert [folder for folder in folders if f"results are in {folder}\n" not in printed] == []


def test_steps_are_profiled() -> None:
    recipe(*FAKE, "--epochs", "5", "--max-steps", "6", "--profile")
    assert [file.name for file in OUT.glob("trace*")] == ["trace-step5-rank0.json.gz"]


def test_max_steps_ends_within_an_epoch() -> None:
    lines = recipe(*FAKE, "--epochs", "5", "--max-steps", "4")
    assert [(line["epoch"], line["step"]) for line in lines] == [(0, 3), (1, 4)]


def test_the_learning_rate_scales_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--lr-scaling", "sqrt", "--lr-reference-batch", "32", "--lr-schedule", "constant", "--warmup-epochs", "0")
    (line,) = recipe(*FAKE, "--max-steps", "1", *flags)
    assert line["learning_rate"] == pytest.approx(0.05)
    assert "learning rate 0.1 * sqrt(8/32) = 0.05 (sqrt scaling)" in capsys.readouterr().out


def test_pretrained_layers_of_another_shape_are_left_out_and_frozen_ones_stay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = models.build("resnet8", 7).state_dict()
    torch.save(weights, "seven.pt")
    recipe(*FAKE, "--epochs", "1", "--pretrained", "seven.pt", "--freeze-backbone")
    assert "pretrained seven.pt; layers with random weights: fc\n" in capsys.readouterr().out
    # BatchNorm's statistics too: they belong to the weights.
    backbone = [name for name in weights if not name.startswith("fc.")]
    first = saved()
    assert [name for name in backbone if not torch.equal(first[name], weights[name])] == []
    recipe(*FAKE, "--epochs=2", "--pretrained=out/model.pt", "--freeze-backbone", "--resume=never")
    assert not torch.equal(saved()["fc.weight"], first["fc.weight"])


def test_weights_of_torchvision(no_network: None, capsys: pytest.CaptureFixture[str]) -> None:
    weights = models.build("resnet18", 1000).state_dict()
    TORCHVISION.parent.mkdir(parents=True)
    torch.save(weights, TORCHVISION)  # as if it had been downloaded
    flags = ("--model", "resnet18", "--pretrained", "torchvision", "--freeze-backbone")
    recipe("--data", "digits", "--max-steps", "1", *flags)
    assert "layers with random weights: fc\n" in capsys.readouterr().out
    assert torch.equal(saved()["layer4.1.conv2.weight"], weights["layer4.1.conv2.weight"])


class Code:
    """Makes a file as it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("was_run"),)


def test_weights_of_torchvision_are_data_and_no_code(no_network: None) -> None:
    TORCHVISION.parent.mkdir(parents=True)
    torch.save({"fc.weight": Code()}, TORCHVISION)
    with pytest.raises(ConfigError, match=r"more than tensors\. Remove .*/resnet18-f37072fd\.pth"):
        recipe(*FAKE, "--model", "resnet18", "--pretrained", "torchvision")
    assert not Path("was_run").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tracker", "tensorboard,neptune"), r"must be a list \(tensorboard,wandb\), each .* or mlflow\."),
        (("--model", "resnet19"), "--model is 'resnet19', but must be resnet8, resnet18"),
        (("--data", "nope"), "--data is 'nope', but must be digits, cifar10, flowers102, imagefolder:PATH or fake"),
        (("--data", "fake:0"), "--data is 'fake:0'"),
        (("--data", "digits:3"), "--data is 'digits:3'"),
        (("--lr", "nan"), "--lr is 'nan'"),
        (("--momentum", "1"), "--momentum is '1', but must be a number >= 0, < 1"),
        (("--lr-floor", "0.5"), "floor is 0.5, but must be between 0 and the peak, 0.1"),
        (("--warmup-epochs", "3", "--epochs", "2"), "warm-up takes 9 steps, but training has only 6"),
        (("--output-dir", "file/out"), r"output folder can't be written: .*file/out"),
        (("--output-dir", "file"), r"output folder can't be written: .*'file'"),
        (("--predict", "file"), "is not the folder of a run, which has config.yaml"),
        (("--pretrained", "nowhere.pt"), "pretrained nowhere.pt can't be used: .*does not exist"),
        (("--pretrained", "file"), "pretrained file can't be used"),
        (("--pretrained", "number.pt"), r"pretrained number.pt has no state dict"),
        (("--pretrained", "other.pt"), "pretrained other.pt has no layer with .* resnet8"),
        (("--pretrained", "torchvision"), "torchvision has no weights for resnet8"),
        (("--model=resnet18", "--pretrained=torchvision"), "can't be downloaded: .*refused.*pass the file as --pre"),
        (("--data", "cifar10"), "data cifar10 is not in data and can't be downloaded: .*refused.*Unpack https://"),
        (("--data", "flowers102"), "data flowers102 is not in data and can't be downloaded: .*refused.*102flowers.tgz"),
        (("--data", "imagefolder:."), "data imagefolder:. can't be used: .*must have one folder of images per class"),
    ],
)
def test_what_can_not_be_is_refused(no_network: None, flags: tuple[str, ...], said: str) -> None:
    Path("file").write_text("text")
    torch.save(3, "number.pt")
    torch.save({"fc.weight": torch.zeros(1)}, "other.pt")
    with pytest.raises(ConfigError, match=said):
        recipe(*FAKE, *flags)
    assert not OUT.exists()
