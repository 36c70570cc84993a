"""``draw_detections``: pictures with the boxes that a detector finds."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.utils import draw_bounding_boxes, make_grid, save_image

from unitrain.recipes.object_detection.data import Boxes

_SIDE = 320  # smaller images are enlarged, so that labels can be read
_COLOURS = ("red", "lime", "deepskyblue", "orange", "magenta", "yellow", "cyan", "violet")


def draw_detections(
    model: nn.Module, images: Boxes, classes: tuple[str, ...], file: Path, *, count: int = 8, threshold: float = 0.5
) -> None:
    """Write a PNG of the first images of a dataset: in white the boxes of its objects, in colours what a model finds.

    Args:
        model: a detector on the CPU, in eval mode.
        images: a dataset that does not augment.
        classes: names of the classes.
        file: the PNG.
        count: number of images.
        threshold: the lowest score of a box that is drawn.
    """
    pictures = []
    for index in range(min(count, len(images))):
        image, target = images[index]
        with torch.no_grad():
            (found,) = model([image])
        factor = max(1, round(_SIDE / max(image.shape[1:])))
        picture = (F.interpolate(image[None], scale_factor=factor)[0] * 255).byte()
        sure = found["scores"] >= threshold
        labels, scores = found["labels"][sure].tolist(), found["scores"][sure].tolist()
        names = [f"{classes[label - 1]} {score:.2f}" for label, score in zip(labels, scores, strict=True)]
        colours = [_COLOURS[label % len(_COLOURS)] for label in labels]
        if len(target["boxes"]):  # torchvision warns of an empty list
            picture = draw_bounding_boxes(picture, target["boxes"] * factor, colors="white", width=2)
        if names:
            boxes = found["boxes"][sure] * factor
            picture = draw_bounding_boxes(picture, boxes, labels=names, colors=colours, width=2, fill_labels=True)
        pictures.append(picture)
    height, width = (max(picture.shape[side] for picture in pictures) for side in (1, 2))
    # Images of different sizes stand at the top left of equal cells.
    cells = [F.pad(p, (0, width - p.shape[2], 0, height - p.shape[1]), value=255) for p in pictures]
    save_image(make_grid(cells, nrow=4, pad_value=255).float() / 255, file)
