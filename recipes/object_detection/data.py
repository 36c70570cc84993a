"""Datasets of the detection recipe: each sample is an image, a float tensor (3, height, width), and a dict of boxes.

Images have different sizes: a batch is a list of images and a list of dicts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from xml.etree import ElementTree

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from unitrain import ConfigError, DataError

DataName = Annotated[
    str,
    Field(
        pattern=r"^(shapes(:[1-9][0-9]{0,5})?|coco:.+|voc(2007|2012):.+)$",
        json_schema_extra={"allowed": "shapes[:N], coco:PATH, voc2007:PATH or voc2012:PATH"},
    ),
]
"""A name that ``load`` accepts."""

_SHAPES = 1000  # images for training, if no number is given
_FIRST_OF_VALIDATION = 1_000_000  # number of the first image of shapes that is no training image


class Labelled(NamedTuple):
    """An image and the objects in it."""

    image: Path | Tensor
    """A file, or the pixels (3, height, width) in uint8."""
    height: int
    width: int
    boxes: Tensor
    """Boxes (objects, 4), each as x1, y1, x2, y2 in pixels."""
    labels: Tensor
    """Classes of the objects, from 1. 0 is the background."""
    crowd: Tensor
    """Whether a box is no single object, or one too difficult to find: it is not trained on, and its detection
    counts neither as right nor as wrong."""


class Boxes(Dataset[tuple[Tensor, dict[str, Any]]]):
    """A map-style dataset of labelled images. Its samples are (image, target).

    A target has ``boxes`` and ``labels``; for training without those of crowds, and for validation with ``iscrowd`` and
    ``image``, the sample's index.

    Args:
        images: the images. Boxes are cut at the edges of the image, and those without an area are left out.
        augment: for training, the transforms that change images at random.
    """

    def __init__(self, images: Sequence[Labelled], augment: Sequence[Any] | None = None) -> None:
        from torchvision.transforms import v2

        self.images: list[Labelled] = [_clean(image) for image in images]
        self.dropped: int = sum(len(image.boxes) for image in images) - sum(len(image.boxes) for image in self.images)
        self.fingerprint: str = _fingerprint(self.images)
        self._training = augment is not None
        scaled = v2.ToDtype(torch.float32, scale=True)
        self._transform = v2.Compose([v2.ToImage(), *(augment or ()), scaled, v2.ToPureTensor()])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        from torchvision import tv_tensors

        image = self.images[index]
        boxes = tv_tensors.BoundingBoxes(image.boxes, format="XYXY", canvas_size=(image.height, image.width))
        target = {"boxes": boxes, "labels": image.labels}
        if not self._training:
            target |= {"iscrowd": image.crowd.long(), "image": index}
        elif image.crowd.any():
            target = {key: value[~image.crowd] for key, value in target.items()}
            target["boxes"] = tv_tensors.wrap(target["boxes"], like=boxes)
        found: tuple[Tensor, dict[str, Any]] = self._transform(_pixels(image), target)
        return found


class Detection(NamedTuple):
    """A training set and a validation set, with boxes of the same classes."""

    train: Boxes
    validation: Boxes
    classes: tuple[str, ...]
    """Names of the classes: label 1 is the first."""


def collate(samples: list[tuple[Tensor, dict[str, Any]]]) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Return the list of images and the list of targets: what torchvision's detectors take."""
    return [image for image, _ in samples], [target for _, target in samples]


def load(name: str) -> Detection:
    """Return a dataset.

    Args:
        name: a ``DataName``.

    Raises:
        ConfigError: a file is missing or can't be read, or the training and the validation set have different classes.
    """
    kind, _, argument = name.partition(":")
    if kind == "shapes":
        return _shapes(int(argument or _SHAPES))
    folder = Path(argument)
    try:
        sets, classes = _coco(folder) if kind == "coco" else _voc(folder, kind.removeprefix("voc"))
    except _WrongDataError as error:
        raise ConfigError(f"data {name} can't be used: {error}") from None
    from torchvision.transforms import v2

    # As SSD was trained (Liu et al. 2016, section 2.2), without the changes of colours.
    augment = [v2.RandomIoUCrop(), v2.RandomHorizontalFlip(), v2.SanitizeBoundingBoxes()]
    found = Detection(Boxes(sets[0], augment), Boxes(sets[1]), classes)
    for part, dataset in (("training", found.train), ("validation", found.validation)):
        if not any(len(image.boxes) for image in dataset.images):
            raise ConfigError(f"data {name} can't be used: no {part} image has a box with an area.")
    return found


class _WrongDataError(Exception):
    """What is wrong with the data, as a sentence."""


# ------------------------------------------------------------------------------------------------------- the layouts


def _shapes(count: int) -> Detection:
    from torchvision.transforms import v2

    from unitrain.recipes.object_detection.shapes import CLASSES, draw

    def drawn(first: int, count: int) -> list[Labelled]:
        images = (draw(number) for number in range(first, first + count))
        return [Labelled(x, x.shape[1], x.shape[2], boxes, labels, labels < 0) for x, boxes, labels in images]

    validation = drawn(_FIRST_OF_VALIDATION, max(1, count // 5))
    return Detection(Boxes(drawn(0, count), [v2.RandomHorizontalFlip()]), Boxes(validation), CLASSES)


def _coco(folder: Path) -> tuple[list[list[Labelled]], tuple[str, ...]]:
    """Read what COCO's instances_*.json say. Categories may have any ids: labels count them in their order."""
    files = [folder / "annotations" / f"instances_{part}2017.json" for part in ("train", "val")]
    contents = [_read(file, lambda file: json.loads(file.read_text(encoding="utf-8"))) for file in files]
    try:
        names = [{entry["id"]: str(entry["name"]) for entry in content["categories"]} for content in contents]
        if names[0] != names[1]:
            different = sorted({str(item) for item in names[0].items() ^ names[1].items()})
            raise _WrongDataError(
                f"{files[0]} and {files[1]} have different categories: (id, name) in only one of them: "
                f"{', '.join(different)}."
            )
        labels = {identity: label for label, identity in enumerate(sorted(names[0]), start=1)}
        sets = [
            _of_coco(content, folder / part, file, labels)
            for content, part, file in zip(contents, ("train2017", "val2017"), files, strict=True)
        ]
    except (TypeError, LookupError, ValueError) as error:
        raise _WrongDataError(
            f"{files[0]} or {files[1]} is not an instances file of COCO ({type(error).__name__}: {error}). It has "
            "images, annotations and categories."
        ) from None
    return sets, tuple(names[0][identity] for identity in labels)


def _of_coco(content: Any, folder: Path, file: Path, labels: dict[Any, int]) -> list[Labelled]:
    objects: dict[Any, list[tuple[list[float], int, bool]]] = {image["id"]: [] for image in content["images"]}
    for entry in content["annotations"]:
        if entry["image_id"] not in objects:
            raise _WrongDataError(f"{file} has an annotation of image {entry['image_id']}, but no such image.")
        if entry["category_id"] not in labels:
            raise _WrongDataError(f"{file} has an annotation of category {entry['category_id']}, but no such category.")
        x, y, width, height = entry["bbox"]
        box = [x, y, x + width, y + height]
        objects[entry["image_id"]].append((box, labels[entry["category_id"]], bool(entry.get("iscrowd"))))
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    for image in content["images"]:
        if image["file_name"] not in there:
            raise _WrongDataError(f"{file} names the image {image['file_name']}, which is not in {folder}.")
    return [
        _labelled(folder / image["file_name"], image["height"], image["width"], objects[image["id"]])
        for image in content["images"]
    ]


def _voc(folder: Path, year: str) -> tuple[list[list[Labelled]], tuple[str, ...]]:
    """Read what VOC's train.txt and val.txt list. The classes are those of the objects, in alphabetic order."""
    from torchvision.datasets import VOCDetection

    found = []
    for part in ("train", "val"):
        try:
            listed = VOCDetection(str(folder), year, part)
        except (OSError, RuntimeError) as error:
            raise _WrongDataError(
                f"{str(error).rstrip('.')}. {folder} must have VOCdevkit/VOC{year}/ImageSets/Main/{part}.txt."
            ) from None
        found.append([_of_voc(Path(a), Path(i)) for a, i in zip(listed.annotations, listed.images, strict=True)])
    names = [{name for _, _, _, objects in part for _, name, _ in objects} for part in found]
    if unknown := names[1] - names[0]:
        raise _WrongDataError(
            f"the images of val.txt have classes that those of train.txt lack: {', '.join(sorted(unknown))}."
        )
    classes = tuple(sorted(names[0]))
    labels = {name: label for label, name in enumerate(classes, start=1)}
    sets = [
        [
            _labelled(image, height, width, [(box, labels[name], difficult) for box, name, difficult in objects])
            for image, height, width, objects in part
        ]
        for part in found
    ]
    return sets, classes


def _of_voc(file: Path, image: Path) -> tuple[Path, int, int, list[tuple[list[float], str, bool]]]:
    annotation = _read(file, ElementTree.parse).getroot()

    def text(element: Any, path: str) -> str:
        value = element.findtext(path)
        if value is None:
            raise _WrongDataError(f"{file} is not an annotation of VOC: it has no {path} in {element.tag}.")
        return str(value).strip()

    if not image.is_file():
        raise _WrongDataError(f"{file} is there, but its image {image} is not.")
    objects = []
    try:
        for thing in annotation.iterfind("object"):
            x1, y1, x2, y2 = (float(text(thing, f"bndbox/{edge}")) for edge in ("xmin", "ymin", "xmax", "ymax"))
            # VOC counts pixels from 1, and a box includes its last pixel.
            objects.append(([x1 - 1, y1 - 1, x2, y2], text(thing, "name"), thing.findtext("difficult") == "1"))
        return image, int(text(annotation, "size/height")), int(text(annotation, "size/width")), objects
    except ValueError as error:
        raise _WrongDataError(f"{file} is not an annotation of VOC: {error}.") from None


# ------------------------------------------------------------------------------------------------------------ parts


def _read(file: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(file)
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise _WrongDataError(f"{file} can't be read: {str(error).rstrip('.')}.") from None


def _labelled(image: Path, height: int, width: int, objects: list[tuple[list[float], int, bool]]) -> Labelled:
    boxes = torch.tensor([box for box, _, _ in objects], dtype=torch.float32).reshape(-1, 4)
    labels = torch.tensor([label for _, label, _ in objects], dtype=torch.int64)
    return Labelled(image, height, width, boxes, labels, torch.tensor([crowd for *_, crowd in objects]).bool())


def _clean(image: Labelled) -> Labelled:
    edges = torch.tensor([image.width, image.height, image.width, image.height], dtype=torch.float32)
    boxes = torch.minimum(image.boxes.clamp(min=0), edges)
    kept = (boxes[:, 2:] > boxes[:, :2]).all(1)  # False for NaN
    return image._replace(boxes=boxes[kept], labels=image.labels[kept], crowd=image.crowd[kept])


def _fingerprint(images: list[Labelled]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for image in images:
        name = image.image.name if isinstance(image.image, Path) else ""
        digest.update(f"{name} {image.boxes.tolist()} {image.labels.tolist()}".encode())
    return digest.hexdigest()


def _pixels(image: Labelled) -> Any:
    from torchvision import tv_tensors
    from torchvision.datasets.folder import default_loader

    if isinstance(image.image, Tensor):
        return tv_tensors.Image(image.image)
    try:
        picture = default_loader(str(image.image))
    except OSError as error:
        raise DataError(f"{image.image} can't be read as an image: {error}") from None
    if picture.size != (image.width, image.height):
        width, height = picture.size
        raise DataError(
            f"{image.image} has {width}x{height} pixels, but its annotation says {image.width}x{image.height}: its "
            "boxes belong to another image."
        )
    return picture
