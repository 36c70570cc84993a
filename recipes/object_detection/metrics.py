"""``AveragePrecision``: COCO's mean average precision over the images of all ranks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from unitrain import ConfigError, Loader, Strategy
from unitrain.recipes.object_detection.data import Detection, Labelled


class AveragePrecision:
    """Mean average precision (mAP), computed by torchmetrics from the detections of all ranks.

    Every image counts once, in the order of the dataset. So the result does not depend on the number of ranks, not even
    where detections have equal scores.

    Args:
        strategy: the strategy of this run; its rank 0 computes.

    Raises:
        ConfigError: torchmetrics or pycocotools is not installed.
    """

    def __init__(self, strategy: Strategy) -> None:
        missing = [name for name in ("torchmetrics", "pycocotools") if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"mean average precision needs {' and '.join(missing)}: run pip install 'unitrain[detection]'."
            )
        self._strategy = strategy

    def of(self, model: nn.Module, images: Loader) -> dict[str, float]:
        """Return a model's mAP: ``map`` is its mean over COCO's ten thresholds of IoU, ``map_50`` at 0.5. Collective.

        Args:
            model: a prepared detector.
            images: a loader of a ``Boxes`` that does not augment.
        """
        found = []
        with self._strategy.evaluation(model), self._strategy.autocast():
            for pictures, targets in images:
                pairs = zip(targets, model(pictures), strict=True)
                found += [{"target": target, "detection": detection} for target, detection in pairs]
        every = self._strategy.gather(found)
        return self._strategy.on_main(lambda: average_precision(every))


def average_precision(images: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mAP of detections in images, each a dict with a ``target`` and a ``detection``, in any order."""
    from torchmetrics.detection import MeanAveragePrecision

    # On rank 0 alone, torchmetrics would wait for the other ranks' images, which are here already.
    metric = MeanAveragePrecision(sync_on_compute=False)
    metric.warn_on_many_detections = False  # the 100 best of a class count, as in COCO's own evaluation
    images = sorted(images, key=lambda image: int(image["target"]["image"]))
    metric.update([image["detection"] for image in images], [image["target"] for image in images])
    values = metric.compute()
    return {name: float(values[name]) for name in ("map", "map_50")}


def mean_boxes(data: Detection) -> float:
    """Return the mAP of a detector that does not look: each class's mean box, in every image for validation.

    The mean is over the training set, relative to the image's size. The score is the class's share of all objects.
    """
    corners, labels = [], []
    for image in data.train.images:
        corners.append(image.boxes[~image.crowd] / _edges(image))
        labels.append(image.labels[~image.crowd])
    every, label = torch.cat(corners), torch.cat(labels)
    classes = sorted(set(label.tolist()))
    means = torch.stack([every[label == one].mean(0) for one in classes])
    shares = torch.stack([(label == one).float().mean() for one in classes])
    found = []
    for index, image in enumerate(data.validation.images):
        target = {"boxes": image.boxes, "labels": image.labels, "iscrowd": image.crowd.long(), "image": index}
        detection = {"boxes": means * _edges(image), "labels": torch.tensor(classes), "scores": shares}
        found.append({"target": target, "detection": detection})
    return average_precision(found)["map"]


def _edges(image: Labelled) -> Tensor:
    return torch.tensor([image.width, image.height, image.width, image.height])
