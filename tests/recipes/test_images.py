"""The recipes' datasets, each read from files in its original layout."""

from __future__ import annotations

import hashlib
import io
import pickle
import socket
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torchvision.datasets import CIFAR10, Flowers102

from unitrain.errors import ConfigError, DataError
from unitrain.recipes.image_classification import images

FOLDER = Path("unused")


def _picture(seed: int, height: int = 40, width: int = 60) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def _labels(dataset: Any) -> list[int]:
    return [int(label) for _, label in dataset]


def _assert_pictures(data: images.Images, size: int) -> None:
    for dataset in (data.train, data.validation):
        image, label = dataset[0]
        assert (image.shape, image.dtype) == ((3, size, size), torch.float32)
        assert 0 <= label < len(data.classes)
    # Training images are augmented, validation images are always the same.
    assert torch.equal(data.validation[0][0], data.validation[0][0])
    assert any(not torch.equal(data.train[0][0], data.train[0][0]) for _ in range(10))


def test_digits_are_split_by_class_and_always_the_same_way() -> None:
    data = images.load("digits", FOLDER, 32)
    torch.manual_seed(1)
    np.random.seed(1)
    again = images.load("digits", FOLDER, 32)
    assert (len(data.train), len(data.validation), len(data.classes)) == (1437, 360, 10)
    assert torch.equal(data.train.tensors[0], again.train.tensors[0])
    assert torch.equal(data.validation.tensors[1], again.validation.tensors[1])
    counts = torch.bincount(data.validation.tensors[1])
    assert counts.min() >= 34
    assert counts.max() <= 38
    pixels = data.train.tensors[0]
    assert pixels.shape[1:] == (3, 8, 8)
    assert abs(pixels.mean()) < 0.02
    assert abs(pixels.std() - 1) < 0.02


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, count in (("train", 3), ("val", 1)):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                _picture(i).save(tmp_path / part / name / f"{i}.png")
    return tmp_path


def test_image_folder(folder: Path) -> None:
    data = images.load(f"imagefolder:{folder}", FOLDER, 32)
    assert (_labels(data.train), _labels(data.validation)) == ([0, 0, 0, 1, 1, 1], [0, 1])
    _assert_pictures(data, 32)


def test_an_image_folder_without_parts_is_split_by_class(folder: Path) -> None:
    data = images.load(f"imagefolder:{folder / 'train'}", FOLDER, 32, val_fraction=0.5)
    assert data.classes == ["cat", "dog"]
    assert (sorted(_labels(data.train)), sorted(_labels(data.validation))) == ([0, 1, 1], [0, 0, 1])
    both = [dataset.dataset.samples[i][0] for dataset in (data.train, data.validation) for i in dataset.indices]
    assert len(set(both)) == 6
    _assert_pictures(data, 32)
    with pytest.raises(ConfigError, match=r"can't be split: .*split them in train/ and val/ yourself"):
        images.load(f"imagefolder:{folder / 'val'}", FOLDER, 32)


def _renamed(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / old).rename(folder / new)


def _removed(*patterns: str) -> Callable[[Path], object]:
    def remove(folder: Path) -> None:
        for pattern in patterns:
            for path in list(folder.glob(pattern)):
                path.rmdir() if path.is_dir() else path.unlink()

    return remove


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            _renamed("val", "test"),
            "can't be used: .*/val'. It must have one folder of images per class, or train/ and val/",
        ),
        (_removed("val/*/*.png", "val/*"), "can't be used: .*any class folder in .*/val. It must have"),
        (_removed("val/dog/0.png"), "can't be used: .*no valid file for the classes dog"),
        (_renamed("val/dog", "val/wolf"), "has classes in only one of train/ and val/: dog, wolf"),
    ],
)
def test_image_folder_that_is_laid_out_otherwise(folder: Path, spoil: Callable[[Path], object], said: str) -> None:
    spoil(folder)
    with pytest.raises(ConfigError, match=f"data imagefolder:{folder} {said}"):
        images.load(f"imagefolder:{folder}", FOLDER, 32)


def test_a_file_that_is_no_image_is_named(folder: Path) -> None:
    bad = folder / "train" / "cat" / "0.png"
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match=f"{bad} can't be read as an image"):
        images.load(f"imagefolder:{folder}", FOLDER, 32).train[0]


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def _small_cifar10(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write CIFAR-10's python version with 4 images a batch, and let torchvision know these files' checksums."""
    files = folder / CIFAR10.base_folder
    files.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, *_ in [*CIFAR10.train_list, *CIFAR10.test_list]:
        batch = {"data": random.integers(0, 256, (4, 3072), np.uint8), "labels": random.integers(0, 10, 4).tolist()}
        (files / name).write_bytes(pickle.dumps(batch))
    meta = CIFAR10.meta["filename"]
    (files / meta).write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    for table in ("train_list", "test_list"):
        checksums = [[name, _md5(files / name)] for name, _ in getattr(CIFAR10, table)]
        monkeypatch.setattr(CIFAR10, table, checksums)
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": _md5(files / meta)})


def _small_flowers102(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write Flowers102 with 6 images, and let torchvision know these files' checksums."""
    files = folder / "flowers-102"
    (files / "jpg").mkdir(parents=True)
    for i in range(1, 7):
        _picture(i).save(files / "jpg" / f"image_{i:05d}.jpg")
    savemat(files / "imagelabels.mat", {"labels": np.array([[1, 102, 3, 1, 102, 3]])})
    splits = {"trnid": np.array([[1, 2, 3]]), "valid": np.array([[4, 5]]), "tstid": np.array([[6]])}
    savemat(files / "setid.mat", splits)
    names = {key: name for key, (name, _) in Flowers102._file_dict.items()}
    checksums = {key: (names[key], _md5(files / names[key])) for key in ("label", "setid")}
    monkeypatch.setattr(Flowers102, "_file_dict", {**Flowers102._file_dict, **checksums})


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_cifar10(tmp_path, monkeypatch)
    data = images.load("cifar10", tmp_path, 224)
    assert (len(data.train), len(data.validation), len(data.classes)) == (20, 4, 10)
    _assert_pictures(data, 32)


def test_flowers102(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_flowers102(tmp_path, monkeypatch)
    data = images.load("flowers102", tmp_path, 32)
    assert (_labels(data.train), _labels(data.validation), len(data.classes)) == ([0, 101, 2], [0, 101], 102)
    _assert_pictures(data, 32)


def test_a_download_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = io.BytesIO()
    failures = iter([RuntimeError("File not found or corrupted."), HTTPError("url", 404, "Gone", Message(), answer)])

    def download(self: CIFAR10) -> None:
        raise next(failures)

    monkeypatch.setattr(CIFAR10, "download", download)
    for said in ("File not found or corrupted", "HTTP Error 404: Gone"):
        with pytest.raises(ConfigError, match=rf"can't be downloaded: {said}\. Unpack {CIFAR10.url} in {tmp_path}"):
            images.load("cifar10", tmp_path, 32)
    assert answer.closed, "the connection is not left open"


def test_a_server_that_gives_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(urllib.request, "_opener", None)  # keeps the proxies that it found first
    monkeypatch.setattr("unitrain.recipes.shared.downloads._TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{silent.getsockname()[1]}/cifar.tar.gz")
        with pytest.raises(ConfigError, match=r"can't be downloaded: .*timed out"):
            images.load("cifar10", tmp_path, 32)
    assert socket.getdefaulttimeout() is None
