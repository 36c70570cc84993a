"""``draw``: an image of squares, circles and triangles on noise, for object detection without a download."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import box_iou

CLASSES: tuple[str, ...] = ("circle", "square", "triangle")

_SIDES = (80, 113)  # height and width of an image: at least, and less than
_SIZES = (16, 49)  # those of a shape
_MOST = 4  # shapes in an image; one image in five has none
_OVERLAP = 0.1  # the largest IoU of two shapes
_GREYS = 16  # levels of the noise


def draw(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return an image, the boxes around its shapes, and their labels.

    Args:
        number: of the image. It is the same wherever it is drawn, and independent of any other.

    Returns:
        Pixels (3, height, width) in uint8, boxes (shapes, 4) as x1, y1, x2, y2, and labels: 1 is the first of
        ``CLASSES``.
    """
    random = torch.Generator().manual_seed(number)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    height, width = integer(*_SIDES), integer(*_SIDES)
    pixels = torch.randint(_GREYS, (1, height, width), generator=random, dtype=torch.uint8).mul(256 // _GREYS)
    pixels = pixels.repeat(3, 1, 1)
    boxes, labels = torch.zeros(0, 4), list[int]()
    for _ in range(integer(0, _MOST + 1)):
        h, w = integer(*_SIZES), integer(*_SIZES)
        x, y = integer(0, width - w + 1), integer(0, height - h + 1)
        label, colour = integer(1, len(CLASSES) + 1), torch.randint(256, (3, 1), generator=random, dtype=torch.uint8)
        if label == CLASSES.index("square") + 1:
            w = h = min(h, w)
        box = torch.tensor([[x, y, x + w, y + h]], dtype=torch.float32)
        if len(boxes) and box_iou(box, boxes).max() > _OVERLAP:
            continue
        pixels[:, y : y + h, x : x + w][:, _covered(CLASSES[label - 1], h, w)] = colour
        boxes, labels = torch.cat([boxes, box]), [*labels, label]
    return pixels, boxes, torch.tensor(labels, dtype=torch.int64)


def _covered(shape: str, height: int, width: int) -> Tensor:
    """Return which pixels of its box a shape covers."""
    # From -1 to 1, at the middle of each pixel.
    y = ((torch.arange(height) + 0.5) / height * 2 - 1)[:, None]
    x = ((torch.arange(width) + 0.5) / width * 2 - 1)[None]
    if shape == "circle":
        return x**2 + y**2 <= 1
    if shape == "triangle":
        return x.abs() * 2 <= y + 1
    return torch.ones(height, width, dtype=torch.bool)
