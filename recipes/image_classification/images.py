"""Datasets of the recipes: each image is a normalised float tensor (3, height, width), each label an int.

torchvision and scikit-learn are imported in the functions that need them, since each takes as long as importing torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch.utils.data import Subset, TensorDataset

from unitrain import ConfigError, DataError
from unitrain.recipes.shared.downloads import downloading

DataName = Annotated[
    str,
    Field(
        pattern=r"^(digits|cifar10|flowers102|imagefolder:.+|fake(:[1-9][0-9]{0,8})?)$",
        json_schema_extra={"allowed": "digits, cifar10, flowers102, imagefolder:PATH or fake[:N]"},
    ),
]
"""A name that ``load`` accepts."""

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Images(NamedTuple):
    """A training set and a validation set, both map-style, with samples (image, label)."""

    train: Any
    validation: Any
    classes: list[str]
    """The names of the classes, by label."""


def load(name: str, folder: Path, size: int, val_fraction: float = 0.2) -> Images:
    """Return a dataset. cifar10 and flowers102 are downloaded if they are not in ``folder``.

    Args:
        name: a ``DataName``.
        folder: the folder of cifar10 and flowers102.
        size: height and width of the images of flowers102, imagefolder and fake; fixed for the others.
        val_fraction: the part of each class that is for validation, of digits and of an imagefolder that isn't split.

    Raises:
        ConfigError: the data is missing and can't be downloaded, or the folders don't have the expected structure.
    """
    kind, _, argument = name.partition(":")
    if kind == "cifar10":
        return _cifar10(folder)
    if kind == "flowers102":
        return _flowers102(folder, size)
    if kind == "imagefolder":
        return _image_folder(Path(argument), size, val_fraction)
    if kind == "fake":
        return _fake(int(argument or 10_000), size)
    return _digits(val_fraction)


def digit(pixels: Any) -> torch.Tensor:
    """Return digits, of pixels from 0 to 16 (rows, 8, 8), as the images of a dataset."""
    # The channel is repeated, since models have three input channels.
    return ((torch.as_tensor(pixels).float() / 16 - 0.305) / 0.376).view(-1, 1, 8, 8).repeat(1, 3, 1, 1)


def _digits(val_fraction: float) -> Images:
    """Return scikit-learn's 8x8 digits."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    train, val = _split(labels, val_fraction)
    images, classes = digit(pixels), torch.from_numpy(labels).long()
    return Images(
        TensorDataset(images[train], classes[train]), TensorDataset(images[val], classes[val]), list("0123456789")
    )


def _split(labels: Any, val_fraction: float) -> tuple[list[int], list[int]]:
    """Return the indices for training and for validation: the same part of each class, independent of the seed."""
    from sklearn.model_selection import train_test_split

    train, val = train_test_split(range(len(labels)), test_size=val_fraction, stratify=labels, random_state=0)
    return train, val


def _cifar10(folder: Path) -> Images:
    from torchvision.datasets import CIFAR10
    from torchvision.transforms import v2

    plain = _to_tensor(_CIFAR_MEAN, _CIFAR_STD)
    augmented = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), plain])
    remedy = f"Unpack {CIFAR10.url} in {folder}, or pass the folder that has it as --data-dir."
    with downloading(f"data cifar10 is not in {folder} and", remedy):
        train = CIFAR10(folder, train=True, transform=augmented, download=True)
        return Images(train, CIFAR10(folder, train=False, transform=plain), list(train.classes))


def _flowers102(folder: Path, size: int) -> Images:
    from torchvision.datasets import Flowers102

    augmented, plain = _photo_transforms(size)
    remedy = (
        "Put 102flowers.tgz (unpacked), imagelabels.mat and setid.mat of https://www.robots.ox.ac.uk/~vgg/data/flowers"
        f"/102 in {folder / 'flowers-102'}, or pass the folder that has flowers-102 as --data-dir."
    )
    with downloading(f"data flowers102 is not in {folder} and", remedy):
        train = Flowers102(folder, "train", transform=augmented, download=True)
        return Images(train, Flowers102(folder, "val", transform=plain), list(train.classes))


def _image_folder(folder: Path, size: int, val_fraction: float) -> Images:
    """Return the images of folders that are named after their classes, in train/ and val/ or to be split."""
    from torchvision.datasets import ImageFolder

    augmented, plain = _photo_transforms(size)
    is_split = (folder / "train").is_dir() or (folder / "val").is_dir()
    try:
        train = ImageFolder(folder / "train" if is_split else folder, augmented, loader=_open_image)
        validation = ImageFolder(folder / "val" if is_split else folder, plain, loader=_open_image)
    except OSError as error:
        reason = str(error).rstrip(".")
        raise ConfigError(
            f"data imagefolder:{folder} can't be used: {reason}. It must have one folder of images per class, or "
            "train/ and val/, each with one folder per class."
        ) from None
    if train.classes != validation.classes:
        different = ", ".join(sorted(set(train.classes) ^ set(validation.classes)))
        raise ConfigError(
            f"data imagefolder:{folder} has classes in only one of train/ and val/: {different}. Both need the same."
        )
    if is_split:
        return Images(train, validation, train.classes)
    try:
        chosen, held_out = _split(train.targets, val_fraction)
    except ValueError as error:  # a class of one image
        raise ConfigError(
            f"data imagefolder:{folder} can't be split: {error} Add images, or split them in train/ and val/ yourself."
        ) from None
    return Images(Subset(train, chosen), Subset(validation, held_out), train.classes)


def _fake(count: int, size: int) -> Images:
    """Return images of noise: ``count`` for training, and a tenth as many for validation."""
    from torchvision.datasets import FakeData

    shape, plain = (3, size, size), _to_tensor(_IMAGENET_MEAN, _IMAGENET_STD)
    train = FakeData(count, shape, 10, plain)
    validation = FakeData(max(1, count // 10), shape, 10, plain, random_offset=count)
    return Images(train, validation, list("0123456789"))


def read(path: Path, name: str, size: int) -> torch.Tensor:
    """Return an image file as a batch of one, prepared as those of a dataset are for validation.

    Args:
        path: the file.
        name: the ``DataName`` of the dataset that the model was trained on.
        size: as in ``load``.
    """
    from torchvision.transforms import v2

    image = _open_image(str(path))
    if name == "digits":  # light on dark, 8x8
        grey = v2.functional.pil_to_tensor(v2.functional.rgb_to_grayscale(image.resize((8, 8))))
        return digit(grey.float() * (16 / 255))
    plain = v2.Compose([v2.Resize((32, 32)), _to_tensor(_CIFAR_MEAN, _CIFAR_STD)])
    batch: torch.Tensor = (plain if name == "cifar10" else _photo_transforms(size)[1])(image)[None]
    return batch


def _photo_transforms(size: int) -> tuple[Any, Any]:
    """Return the usual transforms of photographs, for training and for validation."""
    from torchvision.transforms import v2

    plain = _to_tensor(_IMAGENET_MEAN, _IMAGENET_STD)
    augmented = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), plain])
    return augmented, v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), plain])


def _to_tensor(mean: tuple[float, ...], std: tuple[float, ...]) -> Any:
    from torchvision.transforms import v2

    return v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])


def _open_image(path: str) -> Any:
    from torchvision.datasets.folder import default_loader

    try:
        return default_loader(path)
    except OSError as error:
        raise DataError(f"{path} can't be read as an image: {error}") from None
