"""Models of the detection recipe: torchvision's SSDLite and Faster R-CNN on MobileNets, and a small SSDLite."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torchvision.models.detection import (
    FasterRCNN,
    fasterrcnn_mobilenet_v3_large_320_fpn,
    ssdlite320_mobilenet_v3_large,
)
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD
from torchvision.models.detection.ssdlite import SSDLiteHead
from torchvision.models.mobilenetv2 import InvertedResidual, MobileNetV2
from torchvision.ops import Conv2dNormActivation

from unitrain import ConfigError, Strategy
from unitrain.recipes.image_classification import models

ModelName = Literal[
    "ssdlite96", "ssdlite320_mobilenet_v2", "ssdlite320_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn"
]
SMALL: ModelName = "ssdlite96"

# Expansion, channels, number and stride of MobileNetV2's blocks, in the small one.
_SMALL_BLOCKS = [[1, 16, 1, 2], [4, 32, 1, 2], [4, 64, 1, 2], [4, 64, 1, 1]]


class _Detector(SSD):
    """torchvision's SSD, whose loss comes with the number that it is a mean over.

    It takes images of any size, each (3, height, width) from 0 to 1, and resizes them to its own. In training it also
    takes the targets, and returns a dict: ``matches``, a mean over the default boxes that match an object, and
    ``counts``, a dict with their number. In eval mode it returns a list of dicts of ``boxes``, ``scores`` and
    ``labels``.
    """

    def compute_loss(
        self,
        targets: list[dict[str, Tensor]],
        head_outputs: dict[str, Tensor],
        anchors: list[Tensor],
        matched_idxs: list[Tensor],
    ) -> dict[str, Any]:
        """Return the sum of SSD's losses, and the number of matches."""
        losses = super().compute_loss(targets, _at_least_float32(head_outputs), anchors, matched_idxs)
        matches = sum(int((matched >= 0).sum()) for matched in matched_idxs)
        return {"matches": sum(losses.values()), "counts": {"matches": matches}}

    def postprocess_detections(
        self, head_outputs: dict[str, Tensor], image_anchors: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """Return the detections in each image, the best first."""
        precise = _at_least_float32(head_outputs)
        return cast(list[dict[str, Tensor]], super().postprocess_detections(precise, image_anchors, image_shapes))


def _at_least_float32(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return outputs as float32, if autocast made them less precise: coordinates need more digits."""
    return {name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in outputs.items()}


class _TwoStageDetector(FasterRCNN):
    """torchvision's Faster R-CNN, whose losses come with the numbers that they are means over.

    As ``_Detector``, but for the losses: ``anchors`` is a mean over the anchors that were sampled in all images, and
    ``proposals`` over the sampled proposals.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.anchors: _CountingSampler = _CountingSampler(self.rpn.fg_bg_sampler)
        self.proposals: _CountingSampler = _CountingSampler(self.roi_heads.fg_bg_sampler)
        self.rpn.fg_bg_sampler, self.roi_heads.fg_bg_sampler = self.anchors, self.proposals

    def eager_outputs(self, losses: dict[str, Tensor], detections: list[dict[str, Tensor]]) -> Any:
        """Return the losses and their numbers in training, and otherwise the detections."""
        if not self.training:
            return detections
        return {
            "anchors": losses["loss_objectness"] + losses["loss_rpn_box_reg"],
            "proposals": losses["loss_classifier"] + losses["loss_box_reg"],
            "counts": {"anchors": self.anchors.count, "proposals": self.proposals.count},
        }


class _CountingSampler:
    """Samples what a loss is a mean over, as another sampler does, and counts it."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.count: int = 0

    def __call__(self, labels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        chosen: tuple[list[Tensor], list[Tensor]] = self._sampler(labels)
        self.count = sum(int(mask.sum()) for masks in chosen for mask in masks)
        return chosen


class _FeatureMaps(nn.Module):
    """Feature maps of a MobileNetV2, as in section 6.2 of its paper (Sandler et al. 2018), the finest first.

    The first is the expansion in the last block that halves the resolution, and the second the network's output. Each
    extra block halves the resolution once more.
    """

    def __init__(self, network: MobileNetV2, extra: list[int]) -> None:
        super().__init__()
        self.features: nn.Sequential = network.features
        self.split: int = max(i for i, block in enumerate(self.features) if getattr(block, "stride", 1) == 2)
        channels = [network.last_channel, *extra]
        self.extra: nn.ModuleList = nn.ModuleList(map(_extra_block, channels, extra))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = []
        for index, block in enumerate(self.features):
            if index == self.split:
                expansion, *rest = cast(InvertedResidual, block).conv
                x = expansion(x)
                maps.append(x)
                block = nn.Sequential(*rest)
            x = block(x)
        maps.append(x)
        for block in self.extra:
            maps.append(block(maps[-1]))
        return {str(number): features for number, features in enumerate(maps)}


def _extra_block(inputs: int, outputs: int) -> nn.Sequential:
    half = outputs // 2
    return nn.Sequential(
        Conv2dNormActivation(inputs, half, 1, activation_layer=nn.ReLU6),
        Conv2dNormActivation(half, half, 3, stride=2, groups=half, activation_layer=nn.ReLU6),
        Conv2dNormActivation(half, outputs, 1, activation_layer=nn.ReLU6),
    )


def build(name: ModelName, classes: int) -> nn.Module:
    """Return a model with random weights.

    Args:
        name: name of the model.
        classes: number of classes, without the background.
    """
    if name == "ssdlite320_mobilenet_v3_large":
        ssd = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=classes + 1)
        return _detector(ssd.backbone, ssd.anchor_generator, 320, classes, ssd.head)
    if name == "fasterrcnn_mobilenet_v3_large_320_fpn":
        theirs = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
        return _TwoStageDetector(
            theirs.backbone, classes + 1, rpn_anchor_generator=theirs.rpn.anchor_generator, fixed_size=(320, 320),
            rpn_pre_nms_top_n_test=150, rpn_post_nms_top_n_test=150, rpn_score_thresh=0.05,
        )  # fmt: skip
    if name == "ssdlite320_mobilenet_v2":
        backbone, size = _FeatureMaps(MobileNetV2(), extra=[512, 256, 256, 128]), 320
        boxes = DefaultBoxGenerator([[2, 3]] * 6, min_ratio=0.2, max_ratio=0.95)
    else:
        backbone, size = _FeatureMaps(MobileNetV2(inverted_residual_setting=_SMALL_BLOCKS), extra=[128]), 96
        boxes = DefaultBoxGenerator([[2]] * 3)
    with torch.no_grad():  # in eval mode, so that BatchNorm's statistics stay
        channels = [features.shape[1] for features in backbone.eval()(torch.zeros(1, 3, size, size)).values()]
    head = SSDLiteHead(channels, boxes.num_anchors_per_location(), classes + 1, nn.BatchNorm2d)
    return _detector(backbone.train(), boxes, size, classes, head)


def _detector(backbone: nn.Module, boxes: DefaultBoxGenerator, size: int, classes: int, head: nn.Module) -> nn.Module:
    # The settings of torchvision's SSDLite.
    return _Detector(
        backbone, boxes, (size, size), classes + 1, head=head, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        score_thresh=0.001, nms_thresh=0.55, detections_per_img=300, topk_candidates=300,
    )  # fmt: skip


def load_pretrained(model: nn.Module, name: ModelName, source: str, strategy: Strategy) -> list[str]:
    """Load weights into a model, and return the names of the layers that keep their random weights. Collective.

    Args:
        model: a model that ``build`` returned.
        name: name of the model.
        source: a file with the state dict of a detector or of torchvision's ``mobilenet_v2``, or ``torchvision``: its
            detector of this name, trained on COCO, or its ``mobilenet_v2``, trained on ImageNet.
        strategy: the strategy of this run; its rank 0 reads the file.

    Raises:
        ConfigError: the weights don't exist or can't be read, or no layer matches.
    """
    if name == SMALL and source == "torchvision":
        raise ConfigError(f"torchvision has no weights for {name}: pass a file as --pretrained, or another --model.")
    trained = "mobilenet_v2" if name == "ssdlite320_mobilenet_v2" and source == "torchvision" else name

    def as_backbone(key: str) -> str:
        """Return the name here of a weight of torchvision's classifier."""
        return f"backbone.{key}" if key.startswith("features.") else key

    fresh: list[str] = models.load_pretrained(model, trained, source, strategy, rename=as_backbone)
    return fresh
