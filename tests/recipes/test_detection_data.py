"""Data of the detection recipe: COCO's and VOC's layouts, shapes, what training gets, and messages for wrong data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from unitrain import ConfigError, DataError
from unitrain.recipes.object_detection import data as detection_data

OBJECT = "<object><name>{}</name><difficult>{}</difficult><bndbox>{}</bndbox></object>"
EDGES = ("xmin", "ymin", "xmax", "ymax")


def picture(file: Path, height: int, width: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (200, 200, 200)).save(file)


def make_coco(folder: Path) -> dict[str, dict[str, Any]]:
    """Write a set with three images for training and one for validation, and return the content of its files."""
    content: dict[str, dict[str, Any]] = {}
    for part, count in (("train", 3), ("val", 1)):
        images: list[dict[str, Any]] = [
            {"id": 70 - i, "file_name": f"{i}.jpg", "height": 40, "width": 60 + i} for i in range(count)
        ]
        for image in images:
            picture(folder / f"{part}2017" / image["file_name"], image["height"], image["width"])
        boxes = [(18, [10, 5, 20, 10], 0), (3, [-5, 30, 30, 20], 0), (18, [0, 0, 60, 40], 1), (3, [4, 4, 0, 7], 0)]
        annotations = [
            {"id": i, "image_id": 70, "category_id": category, "bbox": box, "iscrowd": crowd, "area": 1}
            for i, (category, box, crowd) in enumerate(boxes)
        ]
        if part == "train":  # the last image has none, as some of COCO's
            annotations.append(
                {"id": 9, "image_id": 69, "category_id": 3, "bbox": [0, 0, 9, 9], "iscrowd": 0, "area": 1}
            )
        categories = [{"id": 18, "name": "dog"}, {"id": 3, "name": "car"}]
        content[part] = {"images": images, "annotations": annotations, "categories": categories}
    write_coco(folder, content)
    return content


def write_coco(folder: Path, content: dict[str, dict[str, Any]]) -> None:
    (folder / "annotations").mkdir(exist_ok=True)
    for part, value in content.items():
        (folder / "annotations" / f"instances_{part}2017.json").write_text(json.dumps(value))


def make_voc(folder: Path) -> Path:
    """Write a set with three images for training and one for validation, and return the folder of its year."""
    root = folder / "VOCdevkit" / "VOC2012"
    for kind in ("Annotations", "ImageSets/Main"):
        (root / kind).mkdir(parents=True)
    for part, names in (("train", ("2008_1", "2008_2", "2008_3")), ("val", ("2009_1",))):
        (root / "ImageSets" / "Main" / f"{part}.txt").write_text("".join(f"{name}\n" for name in names))
        for name in names:
            picture(root / "JPEGImages" / f"{name}.jpg", 40, 60)
            box = "".join(f"<{edge}>{value}</{edge}>" for edge, value in zip(EDGES, (11, 6, 30, 15), strict=True))
            things = OBJECT.format("sofa", 0, box) + OBJECT.format("cat", 1, box) + OBJECT.format("cat", 0, box)
            size = "<size><width>60</width><height>40</height><depth>3</depth></size>"
            (root / "Annotations" / f"{name}.xml").write_text(f"<annotation>{size}{things}</annotation>")
    return root


def test_coco(tmp_path: Path) -> None:
    make_coco(tmp_path)
    data = detection_data.load(f"coco:{tmp_path}")
    assert data.classes == ("car", "dog")  # in the order of their ids, which leave numbers out
    assert (len(data.train), len(data.validation)) == (3, 1)
    image, target = data.validation[0]
    assert (image.shape, image.dtype) == ((3, 40, 60), torch.float32)
    assert image.mean() == pytest.approx(200 / 255, abs=0.01)
    # Without the box that has no width; cut at the image's edges.
    assert target["boxes"].tolist() == [[10, 5, 30, 15], [0, 30, 25, 40], [0, 0, 60, 40]]
    assert target["labels"].tolist() == [2, 1, 2]
    assert target["iscrowd"].tolist() == [0, 0, 1]
    assert target["image"] == 0
    assert (data.train.dropped, data.validation.dropped) == (1, 1)


def test_voc(tmp_path: Path) -> None:
    make_voc(tmp_path)
    data = detection_data.load(f"voc2012:{tmp_path}")
    assert data.classes == ("cat", "sofa")
    assert (len(data.train), len(data.validation)) == (3, 1)
    _, target = data.validation[0]
    assert target["boxes"].tolist() == [[10, 5, 30, 15]] * 3  # VOC counts pixels from 1
    assert target["labels"].tolist() == [2, 1, 1]
    assert target["iscrowd"].tolist() == [0, 1, 0]


def coco_with(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return a function that writes a set with a change in the annotations for validation."""

    def make(folder: Path) -> None:
        content = make_coco(folder)
        change(content["val"])
        write_coco(folder, content)

    return make


def without(make: Callable[[Path], object], pattern: str) -> Callable[[Path], None]:
    """Return a function that writes a set without a file."""

    def make_and_remove(folder: Path) -> None:
        make(folder)
        [file] = folder.rglob(pattern)
        file.unlink()

    return make_and_remove


def voc_with(old: str, new: str) -> Callable[[Path], object]:
    """Return a function that writes a set with other text in an annotation."""

    def make(folder: Path) -> None:
        file = make_voc(folder) / "Annotations" / "2009_1.xml"
        file.write_text(file.read_text().replace(old, new))

    return make


@pytest.mark.parametrize(
    ("kind", "spoil", "said"),
    [
        ("coco", lambda folder: None, r"instances_train2017.json can't be read: .*No such file"),
        ("coco", without(make_coco, "instances_val2017.json"), r"instances_val2017.json can't be read"),
        ("coco", without(make_coco, "1.jpg"), r"instances_train2017.json names the image 1.jpg, which"),
        ("coco", coco_with(lambda val: val["categories"][0].update(name="wolf")), "different categories.*'wolf'"),
        ("coco", coco_with(lambda val: val["annotations"][0].update(image_id=7)), "of image 7, but no such"),
        ("coco", coco_with(lambda val: val["annotations"][0].update(category_id=1)), "of category 1, but no such"),
        ("coco", coco_with(lambda val: val["annotations"][0].update(bbox=[1, 2])), "not an instances file of COCO"),
        ("coco", coco_with(lambda val: val.pop("annotations")), "not an instances file .*KeyError: 'annotations'"),
        ("coco", coco_with(lambda val: val["annotations"].clear()), "no validation image has a box with an area"),
        ("voc2012", lambda folder: None, r"must have VOCdevkit/VOC2012/ImageSets/Main/train.txt"),
        ("voc2012", without(make_voc, "2009_1.xml"), "2009_1.xml can't be read: "),
        ("voc2012", without(make_voc, "2008_2.jpg"), "image .*2008_2.jpg is not"),
        ("voc2012", without(make_voc, "val.txt"), "must have .*Main/val.txt"),
        ("voc2012", voc_with("sofa", "boat"), "classes that those of train.txt lack: boat"),
        ("voc2012", voc_with("xmin", "left"), "2009_1.xml .* has no bndbox/xmin in object"),
        ("voc2012", voc_with("<height>40", "<height>x"), "2009_1.xml is not an annotation"),
        ("voc2012", voc_with("</annotation>", ""), "2009_1.xml can't be read: no element"),
    ],
)  # fmt: skip
def test_wrong_data_is_one_message(tmp_path: Path, kind: str, spoil: Callable[[Path], None], said: str) -> None:
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=said) as caught:
        detection_data.load(f"{kind}:{tmp_path}")
    assert str(caught.value).startswith(f"data {kind}:{tmp_path} can't be used: ")
    assert "\n" not in str(caught.value)


def test_an_image_that_is_not_the_annotated_one_is_refused_when_it_is_read(tmp_path: Path) -> None:
    make_coco(tmp_path)
    validation = detection_data.load(f"coco:{tmp_path}").validation
    picture(tmp_path / "val2017" / "0.jpg", 40, 41)
    with pytest.raises(DataError, match=r"0\.jpg has 41x40 pixels, but its annotation says 60x40"):
        validation[0]
    (tmp_path / "val2017" / "0.jpg").write_text("text")
    with pytest.raises(DataError, match=r"0\.jpg can't be read as an image"):
        validation[0]
