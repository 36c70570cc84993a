"""torchvision's Faster R-CNN, whose losses are means over sampled anchors and over proposals, on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign

import unitrain
from unitrain.recipes.object_detection import data as detection_data
from unitrain.recipes.object_detection.data import Boxes
from unitrain.recipes.object_detection.models import _TwoStageDetector

IMAGES = 8  # with 0 to 4 boxes
BATCH = 5  # then 3: a rank of two has 2 or 3 of them, and 1 or 2


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


def images() -> Boxes:
    return Boxes(detection_data.load(f"shapes:{IMAGES}").train.images)


def collated(rows: list[Any]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    pictures, targets = detection_data.collate(rows)
    return [picture.double() for picture in pictures], [{**one, "boxes": one["boxes"].double()} for one in targets]


def optimizer_of(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.02, momentum=0.9)


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """Train torchvision's own model in a plain loop."""
    model, data, losses = detector(FasterRCNN), images(), []
    optimizer = optimizer_of(model)
    for _ in range(2):
        for start in range(0, IMAGES, BATCH):
            rows = [data[index] for index in range(start, min(start + BATCH, IMAGES))]
            loss = sum(model(*collated(rows)).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model.state_dict()


def train(settings: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    with unitrain.init(precision="fp64", device="cpu", **settings) as strategy:
        model = detector(_TwoStageDetector)
        model, optimizer = strategy.prepare(model, optimizer_of(model))
        loader = strategy.dataloader(images(), global_batch_size=BATCH, collate_fn=collated)
        found, meters = [], [strategy.meter(), strategy.meter()]
        for _ in loader.epochs(2):
            for pictures, targets in loader:
                losses = model(pictures, targets)
                counts = losses.pop("counts")
                for meter, name in zip(meters, counts, strict=True):
                    meter.add(mean=losses[name], count=counts[name])
                if strategy.step(losses, optimizer, weight=counts).stepped:
                    found.append(sum(meter.value() for meter in meters))
                    meters = [strategy.meter(), strategy.meter()]
        return found, strategy.export(model).state_dict()


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], dict[str, Tensor]]:
    trained: tuple[list[float], dict[str, Tensor]] = run_ranks(plain, nprocs=1)[0]
    return trained


@pytest.mark.parametrize(("nprocs", "settings"), [(1, {}), (2, {}), (3, {}), (2, {"accumulate": 2})], ids=str)
def test_it_trains_as_one_process(
    alone: tuple[list[float], dict[str, Tensor]], nprocs: int, settings: dict[str, Any]
) -> None:
    for losses, state in run_ranks(train, settings, nprocs=nprocs, timeout=120):
        assert losses == pytest.approx(alone[0], rel=1e-9)
        for name, value in alone[1].items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
