"""The detection recipe: the same training under every launcher, its mAP over any number of ranks, models and files."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from needs import HOROVOD
from PIL import Image
from places import ROOT
from ranks import run_ranks
from test_detection_data import make_coco, make_voc
from torch import Tensor, nn
from torchvision.models import mobilenet_v2
from torchvision.models.detection import ssdlite320_mobilenet_v3_large
from tqdm import tqdm

import unitrain
from unitrain import ConfigError
from unitrain.communication.backend import backend_names
from unitrain.recipes import detection
from unitrain.recipes.object_detection import data as detection_data
from unitrain.recipes.object_detection import metrics as detection_metrics
from unitrain.recipes.object_detection import models as detection_models
from unitrain.recipes.object_detection.data import Boxes

RECIPE = ROOT / "recipes" / "detection.py"
V2: detection_models.ModelName = "ssdlite320_mobilenet_v2"
V3: detection_models.ModelName = "ssdlite320_mobilenet_v3_large"
TWO_STAGE: detection_models.ModelName = "fasterrcnn_mobilenet_v3_large_320_fpn"
FLAGS = (
    "model", "data", "epochs", "max-steps", "batch-size", "lr", "warmup-epochs", "checkpoint-every", "profile",
    "momentum", "weight-decay", "workers", "pretrained", "baselines", "output-dir", "resume", "force", "config",
    "strategy.backend",
)  # fmt: skip
# Three steps an epoch, of 9 images: two ranks have different numbers of them.
SHORT = (
    "--data", "shapes:30", "--batch-size", "9", "--max-steps", "4", "--strategy.precision", "fp64",
    "--strategy.sync-batchnorm", "true", "--output-dir", "out", "--resume", "never",
)  # fmt: skip
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node")
STARTS = {
    "torchrun": (*TORCHRUN, "2"),
    "torchrun 3": (*TORCHRUN, "3"),
    "mpirun": ("mpirun", "--oversubscribe", "-np", "2", "python"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of its own, without what torch has downloaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread stays for good
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path


def train(monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[dict[str, Any]]:
    """Run the recipe in this process, and return its metrics."""
    monkeypatch.setattr(sys, "argv", ["detection.py", "--output-dir", "out", *flags])
    detection.main()
    return [json.loads(line) for line in Path("out", "metrics.jsonl").read_text().splitlines()]


# --------------------------------------------------------------------------------------------------- the script


def test_it_is_short_and_names_no_backend() -> None:
    source = RECIPE.read_text()
    assert len([line for line in source.splitlines() if line.strip()]) <= 150
    assert not re.search(rf"\b({'|'.join(backend_names())})\b", source)


def test_every_flag_is_in_the_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train(monkeypatch, "--help")
    said = capsys.readouterr().out
    assert [flag for flag in FLAGS if f"--{flag} " not in said] == []


# ------------------------------------------------------------------------------------------------ every launcher


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of one process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("alone"))
        monkeypatch.setattr(tqdm, "monitor_interval", 0)
        return train(monkeypatch, *SHORT)


@pytest.mark.launcher
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("torchrun", "ddp", marks=pytest.mark.soak),
        pytest.param("mpirun", "horovod", marks=[HOROVOD, pytest.mark.soak]),
        pytest.param("torchrun 3", "ddp", marks=pytest.mark.soak),
    ],
)
def test_training_is_that_of_one_process(alone: list[dict[str, Any]], tmp_path: Path, name: str, backend: str) -> None:
    job = run_job([*STARTS[name], str(RECIPE), *SHORT, "--baselines", "--workers", "1"], tmp_path, deadline=240)
    assert job.code == 0, job.output
    assert job.left == ()
    assert job.output.count("mAP of the untrained network 0.0") == job.output.count("results are in out") == 1
    assert {"model.pt", "curves.png"} <= {path.name for path in (tmp_path / "out").iterdir()}
    with Image.open(tmp_path / "out" / "detections.png") as picture:
        assert (picture.format, picture.size > (800, 400)) == ("PNG", True)
    found = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["backend"]) for line in found] == [(3, backend), (4, backend)]
    for line, expected in zip(found, alone, strict=True):
        for value in ("train_loss", "map", "map_50", "learning_rate"):
            assert line[value] == pytest.approx(expected[value], rel=1e-9), value


# ----------------------------------------------------------------------------------------------------- precision


def overfitted(images: list[detection_data.Labelled]) -> dict[str, Tensor]:
    """Return the weights of a model that knows these images somewhat."""
    torch.manual_seed(0)
    model = detection_models.build("ssdlite96", 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    pictures, targets = detection_data.collate([Boxes(images)[index] for index in range(len(images))])
    for _ in range(40):
        losses = model(pictures, targets)
        losses["matches"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def evaluated(weights: dict[str, Tensor], images: list[detection_data.Labelled]) -> tuple[int, dict[str, float]]:
    """Return the number of images that this rank looks at, and the mAP."""
    with unitrain.init(device="cpu") as strategy:
        model = detection_models.build("ssdlite96", 3)
        model.load_state_dict(weights)
        model = strategy.prepare(model)
        loader = strategy.dataloader(Boxes(images), global_batch_size=7, collate_fn=detection_data.collate)
        with strategy.evaluation(model):
            seen = sum(len(pictures) for pictures, _ in loader)
        return seen, detection_metrics.AveragePrecision(strategy).of(model, loader)


@pytest.mark.all("test_torchmetrics.py has such a metric")
def test_map_is_the_same_to_the_last_digit_on_any_number_of_ranks() -> None:
    images = detection_data.load("shapes:8").train.images
    weights = overfitted(images)
    seen, expected = evaluated(weights, images)
    assert seen == 8
    assert 0.02 < expected["map"] < expected["map_50"] < 1
    for nprocs in (2, 3):
        found = run_ranks(evaluated, weights, images, nprocs=nprocs, timeout=120)
        assert sum(seen for seen, _ in found) == 8  # the last batch has one image
        assert [precision for _, precision in found] == [expected] * nprocs


def test_map_does_not_depend_on_the_order_of_images_where_scores_are_equal() -> None:
    images = detection_data.load("shapes:60").train.images
    random = torch.Generator().manual_seed(0)
    rows = [
        {
            "target": {"boxes": x.boxes, "labels": x.labels, "iscrowd": x.crowd.long(), "image": index},
            # Half of them miss, and all are equally sure.
            "detection": {
                "boxes": x.boxes + 40 * torch.randint(2, (len(x.boxes), 1), generator=random),
                "labels": x.labels,
                "scores": torch.full((len(x.boxes),), 0.5),
            },
        }
        for index, x in enumerate(images)
    ]
    expected = detection_metrics.average_precision(rows)
    assert 0.1 < expected["map"] < 0.9
    for ranks in (2, 3):
        assert detection_metrics.average_precision([row for r in range(ranks) for row in rows[r::ranks]]) == expected


def test_a_detection_of_a_crowd_is_neither_right_nor_wrong() -> None:
    box, crowd = torch.tensor([[10.0, 10, 30, 30]]), torch.tensor([[40.0, 40, 90, 90]])
    target = {"boxes": torch.cat([box, crowd]), "labels": torch.ones(2).long(), "image": 0}
    found = {"boxes": torch.cat([crowd, box]), "labels": torch.ones(2).long(), "scores": torch.tensor([0.9, 0.8])}
    for iscrowd, expected in (([0, 1], 1.0), ([0, 0], 1.0)):
        row = {"target": {**target, "iscrowd": torch.tensor(iscrowd)}, "detection": found}
        assert detection_metrics.average_precision([row])["map"] == pytest.approx(expected)
    alone = {name: value[:1] for name, value in found.items()}
    row = {"target": {**target, "iscrowd": torch.tensor([0, 1])}, "detection": alone}
    assert detection_metrics.average_precision([row])["map"] == 0  # the box was not found


def test_the_mean_box_is_a_weak_detector() -> None:
    assert 0 <= detection_metrics.mean_boxes(detection_data.load("shapes:60")) < 0.05


def test_without_pycocotools_it_says_what_to_install(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection_metrics, "find_spec", lambda name: find_spec(name) if name[0] == "t" else None)
    with pytest.raises(ConfigError, match=r"needs pycocotools: run pip install 'unitrain\[detection\]'\.$"):
        train(monkeypatch, *SHORT)
    assert not Path("out").exists()


# --------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    "name",
    [
        detection_models.SMALL,
        *(pytest.param(name, marks=pytest.mark.all("larger models")) for name in (TWO_STAGE, V2, V3)),
    ],
)
def test_models_find_boxes_in_images_of_different_sizes(name: str) -> None:
    images, targets = detection_data.collate([detection_data.load("shapes:2").train[index] for index in range(2)])
    model = detection_models.build(name, 3)
    losses = model(images, targets)
    counts = losses.pop("counts")
    assert losses.keys() == counts.keys() == ({"anchors", "proposals"} if name == TWO_STAGE else {"matches"})
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert min(counts.values()) >= sum(len(target["boxes"]) for target in targets) > 0
    with torch.no_grad():
        found = model.eval()(images)
    for image, boxes in zip(images, found, strict=True):
        edges = torch.tensor([image.shape[2], image.shape[1]])
        assert 0 < len(boxes["boxes"]) <= 300
        assert (boxes["boxes"].view(-1, 2, 2) <= edges + 1e-3).all()


def test_a_batch_without_boxes_trains_nothing() -> None:
    model = detection_models.build("ssdlite96", 3)
    losses = model([torch.rand(3, 90, 80)], [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long()}])
    assert (losses["counts"]["matches"], losses["matches"].item()) == (0, 0)
    losses["matches"].backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_the_v3_model_is_torchvision_s() -> None:
    ours, theirs = detection_models.build(V3, 90), ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    theirs.load_state_dict(ours.state_dict())
    images = [torch.rand(3, 200, 300), torch.rand(3, 100, 90)]
    targets = [{"boxes": torch.tensor([[10.0, 20, 60, 90]]), "labels": torch.tensor([7])}] * 2
    losses = ours(images, targets)
    assert losses["counts"]["matches"] > 0
    assert losses["matches"] == sum(theirs(images, targets).values())
    with torch.no_grad():
        for mine, its in zip(ours.eval()(images), theirs.eval()(images), strict=True):
            assert all(torch.equal(mine[name], its[name]) for name in ("boxes", "scores", "labels"))


def fresh(name: detection_models.ModelName, source: str) -> tuple[nn.Module, list[str]]:
    with unitrain.init() as strategy:
        model = detection_models.build(name, 3)
        return model, detection_models.load_pretrained(model, name, source, strategy)


def test_weights_of_torchvision_s_detector_but_for_other_classes(here: Path) -> None:
    weights = detection_models.build(V3, 90).state_dict()
    Path("torch", "hub", "checkpoints").mkdir(parents=True)
    torch.save(weights, "torch/hub/checkpoints/ssdlite320_mobilenet_v3_large_coco-a79551df.pth")  # as if downloaded
    model, random = fresh(V3, "torchvision")
    assert {re.sub(r"\.\d+\..*", "", name) for name in random} == {"head.classification_head.module_list"}
    assert len(random) == 6  # the last layer for each feature map
    name = "backbone.extra.0.0.0.weight"
    assert torch.equal(model.state_dict()[name], weights[name])


def test_weights_of_torchvision_s_classifier(here: Path) -> None:
    weights = mobilenet_v2().state_dict()
    Path("torch", "hub", "checkpoints").mkdir(parents=True)
    torch.save(weights, "torch/hub/checkpoints/mobilenet_v2-7ebf99e0.pth")
    torch.save(weights, "file.pth")
    for source in ("torchvision", "file.pth"):
        model, random = fresh(V2, source)
        assert {name.partition(".")[0] for name in random} == {"head", "backbone"}
        assert not any(name.startswith("backbone.features") for name in random)
        state = model.state_dict()
        assert all(torch.equal(state[f"backbone.{key}"], weights[key]) for key in weights if key[0] == "f")


# -------------------------------------------------------------------------------------------------- what it does


@pytest.mark.parametrize("kind", ["coco", pytest.param("voc2012", marks=pytest.mark.all("another format"))])
def test_it_trains_on_a_folder_and_goes_on(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (make_coco if kind == "coco" else make_voc)(here)
    flags = ("--data", f"{kind}:{here}", "--batch-size", "1", "--epochs", "2", "--strategy.precision", "bf16")
    (line,) = train(monkeypatch, *flags, "--max-steps", "2")
    assert (line["epoch"], line["step"]) == (0, 2)
    assert line["train_loss"] > 0
    assert "3 images for training, 1 for validation, 2 classes" in capsys.readouterr().out
    lines = train(monkeypatch, *flags, "--pretrained", "out/model.pt", "--force")
    assert [(line["epoch"], line["step"]) for line in lines] == [(0, 2), (0, 3), (1, 6)]
    said, resumed = capsys.readouterr()
    assert "pretrained out/model.pt; layers with random weights: none\n" in said
    assert "resumed after step 2" in resumed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--data", "digits"), r"--data is 'digits', but must be shapes\[:N\], coco:PATH, voc2007:PATH or voc2012"),
        (("--data", "coco:nowhere"), "data coco:nowhere can't be used: .*instances_train2017.json can't be read"),
        (("--model", "ssd300"), "--model is 'ssd300', but must be ssdlite96, ssdlite320_mobilenet_v2, ssdlite320_m"),
        (("--pretrained", "torchvision"), "torchvision has no weights for ssdlite96: pass a file"),
        (("--pretrained", "nowhere.pt"), "pretrained nowhere.pt can't be used: .*does not exist"),
        (("--pretrained", "other.pt"), "other.pt has no layer with the name and shape of one of ssdlite96"),
    ],
)
def test_what_can_not_be_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], said: str
) -> None:
    torch.save({"fc.weight": torch.zeros(1)}, "other.pt")
    with pytest.raises(ConfigError, match=said):
        train(monkeypatch, "--data", "shapes:2", "--batch-size", "2", *flags)
    assert not Path("out").exists()
