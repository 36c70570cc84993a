"""The detection recipe: its mAP, its models, and its files."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import run_recipe
from test_detection_data import make_coco, make_voc
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, ssdlite320_mobilenet_v3_large
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign

import unitrain
from unitrain import ConfigError
from unitrain.recipes.object_detection import data as detection_data
from unitrain.recipes.object_detection import metrics as detection_metrics
from unitrain.recipes.object_detection import models as detection_models
from unitrain.recipes.object_detection.data import Boxes

V2: detection_models.ModelName = "ssdlite320_mobilenet_v2"
V3: detection_models.ModelName = "ssdlite320_mobilenet_v3_large"
TWO_STAGE: detection_models.ModelName = "fasterrcnn_mobilenet_v3_large_320_fpn"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of its own, without what torch has downloaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path


def test_without_pycocotools_it_says_what_to_install(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection_metrics, "find_spec", lambda name: find_spec(name) if name[0] == "t" else None)
    with pytest.raises(ConfigError, match=r"needs pycocotools: run pip install 'unitrain\[detection\]'\.$"):
        run_recipe("detection", "--data=shapes:2")
    assert not Path("out").exists()


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


def detector(kind: type[FasterRCNN]) -> FasterRCNN:
    """Return a tiny detector that samples every anchor and proposal, in float64."""
    torch.manual_seed(0)
    backbone: Any = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=4, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=4, padding=1), nn.ReLU()
    )
    backbone.out_channels = 8
    model: FasterRCNN = kind(
        backbone, rpn_anchor_generator=AnchorGenerator(((16, 32),), ((1.0,),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 3, 2), box_head=TwoMLPHead(8 * 9, 16),
        box_predictor=FastRCNNPredictor(16, 4), fixed_size=(96, 96), rpn_fg_iou_thresh=0.5,
        rpn_batch_size_per_image=10_000, box_batch_size_per_image=10_000,
    )  # fmt: skip
    assign = model.rpn.assign_targets_to_anchors

    def in_float64(*arguments: Any) -> tuple[list[Tensor], Any]:
        labels, boxes = assign(*arguments)
        return [one.double() for one in labels], boxes

    model.rpn.assign_targets_to_anchors = in_float64  # torchvision's are float32, which the loss would be, too
    return model.double()


def test_the_losses_of_parts_of_a_batch_average_to_those_of_the_batch() -> None:
    """By the counts that come with them, with which the ranks average the losses of their parts."""
    data = Boxes(detection_data.load("shapes:8").train.images)  # with 0 to 4 boxes
    pictures, targets = detection_data.collate([data[index] for index in range(8)])
    pictures = [picture.double() for picture in pictures]
    targets = [{**target, "boxes": target["boxes"].double()} for target in targets]
    model = detector(detection_models._TwoStageDetector)
    whole, *parts = (model(pictures[part], targets[part]) for part in (slice(8), slice(3), slice(3, 4), slice(4, 8)))
    counts = whole.pop("counts")
    for name, loss in whole.items():
        assert counts[name] == sum(part["counts"][name] for part in parts) > 0
        mean = sum(part[name] * part["counts"][name] for part in parts) / counts[name]
        assert mean.item() == pytest.approx(loss.item(), rel=1e-12)
    theirs = detector(FasterRCNN)(pictures, targets)
    assert sum(whole.values()).item() == pytest.approx(sum(theirs.values()).item(), rel=1e-12)


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


@pytest.mark.parametrize("kind", ["coco", pytest.param("voc2012", marks=pytest.mark.all("another format"))])
def test_it_trains_on_a_folder_and_goes_on(here: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    (make_coco if kind == "coco" else make_voc)(here)
    flags = ("--data", f"{kind}:{here}", "--batch-size", "1", "--epochs", "2", "--strategy.precision", "bf16")
    (line,) = run_recipe("detection", *flags, "--max-steps", "2")
    assert (line["epoch"], line["step"]) == (0, 2)
    assert line["train_loss"] > 0
    assert "3 images for training, 1 for validation, 2 classes" in capsys.readouterr().out
    lines = run_recipe("detection", *flags, "--pretrained", "out/model.pt", "--force")
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
def test_what_can_not_be_is_refused(here: Path, flags: tuple[str, ...], said: str) -> None:
    torch.save({"fc.weight": torch.zeros(1)}, "other.pt")
    with pytest.raises(ConfigError, match=said):
        run_recipe("detection", "--data=shapes:2", "--batch-size=2", *flags)
    assert not Path("out").exists()
