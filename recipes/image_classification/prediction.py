"""The classes of a run, and its prediction for an image."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from unitrain import ConfigError, Strategy
from unitrain.recipes.image_classification import images, models

_CLASSES, _WEIGHTS = "class_indices.json", ("best.pt", "model.pt")


def write_classes(folder: Path, classes: Sequence[str]) -> None:
    """Write the names of the classes by label, as JSON, to ``class_indices.json``."""
    indices = {str(label): name for label, name in enumerate(classes)}
    (folder / _CLASSES).write_text(json.dumps(indices, indent=4) + "\n", encoding="utf-8")


def predict(strategy: Strategy, folder: Path | None, image: Path, most: int = 5) -> list[tuple[str, float]]:
    """Return the most probable classes of an image and their probabilities, by a run's best weights. Collective.

    Args:
        strategy: the strategy; its rank 0 reads the weights.
        folder: the run's folder.
        image: the image file.
        most: number of classes.

    Raises:
        ConfigError: the folder is not that of a run.
        DataError: the file is not an image.
    """
    if folder is None:
        raise ConfigError("a prediction needs the folder of a run: pass --output-dir.")
    try:
        settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        indices = json.loads((folder / _CLASSES).read_text(encoding="utf-8"))
        [weights, *_] = [folder / name for name in _WEIGHTS if (folder / name).is_file()]
        classes = [indices[str(label)] for label in range(len(indices))]
        size = models.image_size(settings["model"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{folder} is not the folder of a run, which has config.yaml, {_CLASSES} and {' or '.join(_WEIGHTS)}: "
            f"{error}"
        ) from None
    model = models.build(settings["model"], len(classes)).to(strategy.device).eval()
    model.load_state_dict(strategy.load(weights))
    with torch.no_grad():
        probabilities = model(images.read(image, settings["data"], size).to(strategy.device)).softmax(1)[0]
    top = probabilities.topk(min(most, len(classes)))
    return [(classes[label], p) for p, label in zip(top.values.tolist(), top.indices.tolist(), strict=True)]


def show(strategy: Strategy, folder: Path | None, image: Path) -> None:
    """Print what ``predict`` returns, a line per class. Collective."""
    for name, probability in predict(strategy, folder, image):
        strategy.print(f"{probability:7.2%}  {name}")
