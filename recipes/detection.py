r"""Train an object detector: the same network under every launcher.

    python recipes/detection.py
    torchrun --nproc-per-node 2 recipes/detection.py
    mpirun -np 2 python recipes/detection.py
    horovodrun -np 2 python recipes/detection.py
    srun -n 2 python recipes/detection.py

    torchrun --nproc-per-node 8 recipes/detection.py --model ssdlite320_mobilenet_v3_large --data coco:coco \
        --epochs 660 --batch-size 192 --lr 0.15 --weight-decay 4e-5 --workers 8

By default, it finds squares, circles and triangles: no download, no GPU, about two minutes. --help lists all flags.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from tqdm import tqdm

from unitrain import Meter, init, parse_command_line
from unitrain.features.profile import Profile
from unitrain.features.throughput import Throughput
from unitrain.recipes.object_detection import data as detection_data
from unitrain.recipes.object_detection import models as detection_models
from unitrain.recipes.object_detection.metrics import AveragePrecision, mean_boxes
from unitrain.recipes.object_detection.pictures import draw_detections
from unitrain.recipes.shared.run_folder import RunFolder, resume_or_discard, summarise
from unitrain.recipes.shared.settings import TrainingSettings


class Settings(TrainingSettings):
    """The recipe's settings; each is a flag, and a key in the file passed to --config."""

    MAY_CHANGE: ClassVar[frozenset[str]] = TrainingSettings.MAY_CHANGE | {"baselines"}

    model: detection_models.ModelName = "ssdlite96"
    """torchvision's SSDLite or Faster R-CNN, SSDLite on MobileNetV2, or ssdlite96, which is small enough for a CPU."""
    data: detection_data.DataName = "shapes"
    """N images of shapes (1000), COCO 2017 or VOC; PATH is the folder that has annotations/ or VOCdevkit/."""
    epochs: Annotated[int, Field(ge=1)] = 15
    """Passes over the training set."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Images per optimizer step, over all processes."""
    lr: Annotated[float, Field(gt=0)] = 0.05
    """Peak learning rate, before scaling."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """Weight decay of SGD."""
    pretrained: str | None = None
    """Weights to start from: a file with a state dict (a run's model.pt), or torchvision for its pretrained ones."""
    baselines: bool = False
    """First, print the mAP of the network before training, and that of each class's mean box in every image."""


def main() -> None:
    """Train, and evaluate after each epoch."""
    settings = parse_command_line(Settings, sys.argv[1:], prog="detection.py", description="Train an object detector.")
    strategy = init(settings.strategy)

    precision = AveragePrecision(strategy)
    data = detection_data.load(settings.data)
    # A last step of few images would leave BatchNorm too little on the coarsest feature maps.
    loading = {**settings.loading(), "collate_fn": detection_data.collate}
    train = strategy.dataloader(data.train, shuffle=True, drop_last=True, **loading)
    val = strategy.dataloader(data.validation, **loading)

    model = detection_models.build(settings.model, len(data.classes))
    if settings.pretrained:
        fresh = detection_models.load_pretrained(model, settings.model, settings.pretrained, strategy)
        strategy.print(f"pretrained {settings.pretrained}; layers with random weights: {', '.join(fresh) or 'none'}")
    rate, momentum, decay = settings.learning_rate(train.steps_per_epoch), settings.momentum, settings.weight_decay
    optimizer = torch.optim.SGD(model.parameters(), rate.peak, momentum, weight_decay=decay, fused=True)
    model, optimizer, scheduler = strategy.prepare(model, optimizer, rate.scheduler(optimizer))

    folder = RunFolder(strategy, settings.output_dir, "detection", settings.tracker)
    summarise(strategy, settings.batch_size)
    strategy.print(
        f"{settings.model} on {settings.data}: {len(data.train)} images for training, {len(data.validation)} for "
        f"validation, {len(data.classes)} classes; boxes without an area, left out: "
        f"{data.train.dropped + data.validation.dropped}\nlearning rate {rate}"
    )
    checkpoint = strategy.checkpoint(
        folder.path / "checkpoints", config=settings.decisive(), keep=settings.keep,
        model=model, optimizer=optimizer, scheduler=scheduler, loader=train,
    )  # fmt: skip
    resume_or_discard(checkpoint, settings.resume, force=settings.force)
    folder.begin(settings, strategy.global_step)
    if settings.baselines:
        untrained = precision.of(model, val)["map"]
        strategy.print(f"mAP of the untrained network {untrained:.2%}, of each class's mean box {mean_boxes(data):.2%}")
    throughput, last_step = strategy.add(Throughput()), settings.last_step
    if settings.profile:
        strategy.add(Profile(folder.path))
    for epoch in train.epochs(settings.epochs) if strategy.global_step < last_step else ():
        meters: defaultdict[str, Meter] = defaultdict(strategy.meter)
        with tqdm(train, f"epoch {epoch}", leave=False, mininterval=1, disable=not strategy.is_main or None) as bar:
            for pictures, targets in bar:
                with strategy.autocast():
                    losses = model(pictures, targets)
                # Each loss is a mean over something else, of which each process has another number.
                counts = losses.pop("counts")
                for name, loss in losses.items():
                    meters[name].add(mean=loss, count=counts[name])
                strategy.step(losses, optimizer, scheduler, weight=counts)
                if settings.checkpoint_every and strategy.global_step % settings.checkpoint_every == 0:
                    checkpoint.save()
                if strategy.global_step >= last_step:
                    break
        metrics = {
            "epoch": epoch, "step": strategy.global_step, "train_loss": sum(meter.value() for meter in meters.values()),
            **precision.of(model, val), "learning_rate": rate.at(strategy.global_step - 1), **throughput.read(),
        }  # fmt: skip
        folder.add(metrics)
        strategy.print(
            "epoch {epoch}: loss {train_loss:.4f}, mAP {map:.2%}, at IoU 0.5 {map_50:.2%}, "
            "{samples_per_second:.0f} images/s".format(**metrics)
        )
        ended = strategy.global_step >= last_step or epoch + 1 == settings.epochs
        if ended or not settings.checkpoint_every:
            checkpoint.save()
        if ended:
            break
    else:
        strategy.print("training is complete: start again with --resume never, or train longer: --epochs N --force")
    strategy.save(model, folder.path / "model.pt")
    if strategy.is_main:
        from unitrain.recipes.shared.figures import draw_curves  # takes as long to import as torch

        draw_curves(folder.path, {"loss": ["train_loss"], "mean average precision": ["map", "map_50"]})
        draw_detections(strategy.export(model).float(), data.validation, data.classes, folder.path / "detections.png")
    folder.close()
    strategy.print(f"results are in {folder.path}")
    strategy.close()


if __name__ == "__main__":
    main()
