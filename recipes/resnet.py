r"""Train a ResNet to classify images: the same network under every launcher.

    python recipes/resnet.py
    torchrun --nproc-per-node 2 recipes/resnet.py
    mpirun -np 2 python recipes/resnet.py
    horovodrun -np 2 python recipes/resnet.py
    srun -n 2 python recipes/resnet.py

    torchrun --nproc-per-node 8 recipes/resnet.py --model resnet50 --data imagefolder:imagenet --epochs 90 \
        --batch-size 1024 --lr-scaling linear --workers 8 --strategy.precision bf16

By default, it trains on handwritten digits: no download, no GPU, less than a minute. --help lists all flags.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from tqdm import tqdm

import unitrain
from unitrain import Section, parse_command_line
from unitrain.recipes import images, models
from unitrain.recipes.learning_rate import LearningRate, Scaling, Schedule
from unitrain.recipes.run_folder import RunFolder, summarise

# Settings that may change when a run is resumed, because results don't depend on them.
MAY_CHANGE = {
    "strategy", "output_dir", "data_dir", "workers", "max_steps", "checkpoint_every", "keep", "resume", "force",
    "profile",
}  # fmt: skip


class Settings(Section):
    """The recipe's settings; each is a flag, and a key in the file passed to --config."""

    model: models.ModelName = "resnet8"
    """One of torchvision's ResNets, or resnet8, which is small enough for a CPU."""
    data: images.DataName = "digits"
    """Training images. PATH has train/ and val/, each with a folder per class; fake is N images of noise."""
    data_dir: Path = Path("data")
    """Folder into which cifar10 and flowers102 are downloaded once."""
    epochs: Annotated[int, Field(ge=1)] = 20
    """Passes over the training set."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Stop after this many optimizer steps. The learning rate schedule is still planned for all epochs."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Images per optimizer step, over all processes."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Peak learning rate, before scaling."""
    lr_scaling: Scaling = "none"
    """Scale lr by batch-size / lr-reference-batch (linear), by its square root (sqrt), or not (none)."""
    lr_reference_batch: Annotated[int, Field(ge=1)] = 256
    """Batch size that lr was chosen for, if lr is scaled."""
    lr_schedule: Schedule = "cosine"
    """After warm-up: half a cosine (cosine), a factor of 0.1 after each third of training (step), or constant."""
    lr_floor: Annotated[float, Field(ge=0)] = 0.0
    """Lowest learning rate of the schedule."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 1.0
    """Epochs (fractions allowed) of linear warm-up to the peak."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    """Weight decay of SGD."""
    workers: Annotated[int, Field(ge=0)] = 0
    """DataLoader workers per process; 0 loads images in the training process."""
    pretrained: str | None = None
    """Weights to start from: a file with a state dict (a run's model.pt), or torchvision for its pretrained ones."""
    freeze_backbone: bool = False
    """Train the last layer only."""
    output_dir: Path | None = None
    """Folder of the results and checkpoints; a run in it is resumed. null creates a new one in runs/."""
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps between checkpoints; null saves one after each epoch."""
    keep: Annotated[int, Field(ge=1)] = 3
    """Number of newest checkpoints to keep."""
    resume: str = "auto"
    """auto: from the newest checkpoint in output-dir, if any; never: from the beginning; or a checkpoint's PATH."""
    force: bool = False
    """Resume even if settings have changed since the checkpoint."""
    profile: bool = False
    """Write a profiler trace of a few early steps to trace-rankN.json in output-dir."""
    strategy: unitrain.StrategyConfig = unitrain.StrategyConfig()


def main() -> None:
    """Train, and evaluate after each epoch."""
    settings = parse_command_line(Settings, sys.argv[1:], prog="resnet.py", description="Train a ResNet on images.")
    strategy = unitrain.init(settings.strategy)

    with strategy.main_first():  # one process downloads; then the others find the files
        data = images.load(settings.data, settings.data_dir, models.image_size(settings.model))
    # The global batch size is fixed, so that results don't depend on the number of processes.
    loading: dict[str, Any] = {"num_workers": settings.workers, "persistent_workers": settings.workers > 0}
    train = strategy.dataloader(data.train, global_batch_size=settings.batch_size, shuffle=True, **loading)
    val = strategy.dataloader(data.validation, global_batch_size=settings.batch_size, **loading)

    model = models.build(settings.model, data.classes)
    if settings.pretrained:
        fresh = models.load_pretrained(model, settings.model, settings.pretrained, strategy)
        strategy.print(f"pretrained {settings.pretrained}; layers with random weights: {', '.join(fresh) or 'none'}")
    if settings.freeze_backbone:
        models.freeze_backbone(model)
    rate = LearningRate(
        base=settings.lr, total_steps=settings.epochs * train.steps_per_epoch, schedule=settings.lr_schedule,
        warmup_steps=round(settings.warmup_epochs * train.steps_per_epoch), floor=settings.lr_floor,
        scaling=settings.lr_scaling,
        batch_size=settings.batch_size, reference_batch=settings.lr_reference_batch,
    )  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, rate.peak, settings.momentum, weight_decay=settings.weight_decay, fused=True)
    model, optimizer, scheduler = strategy.prepare(model, optimizer, rate.scheduler(optimizer))

    folder = RunFolder(strategy, settings.output_dir, "resnet")
    summarise(strategy, settings.batch_size)
    strategy.print(
        f"{settings.model} on {settings.data}: {len(data.train)} images for training, {len(data.validation)} for "
        f"validation, {data.classes} classes\nlearning rate {rate}"
    )
    checkpoint = strategy.checkpoint(
        folder.path / "checkpoints",
        config=settings.model_dump(mode="json", exclude=MAY_CHANGE), keep=settings.keep,
        model=model, optimizer=optimizer, scheduler=scheduler, loader=train,
    )  # fmt: skip
    if settings.resume == "never":
        checkpoint.discard()
    elif checkpoint.resume(None if settings.resume == "auto" else settings.resume, force=settings.force):
        strategy.print(f"resumed after step {strategy.global_step}, in epoch {train.epoch}")
    folder.begin(settings, strategy.global_step)
    throughput, profile = strategy.throughput(), folder.profile(settings.profile)
    last_step = settings.max_steps or math.inf
    for epoch in train.epochs(settings.epochs) if strategy.global_step < last_step else ():
        # Meters accumulate on the device; their values over all ranks are read once per epoch.
        learning_rate = scheduler.get_last_lr()[0]
        train_loss, val_loss, val_accuracy = strategy.meter(), strategy.meter(), strategy.meter()
        with tqdm(train, f"epoch {epoch}", leave=False, mininterval=1, disable=not strategy.is_main) as bar:
            for pictures, labels in bar:
                with strategy.autocast():
                    loss = F.cross_entropy(model(pictures), labels)
                train_loss.add(mean=loss, count=len(labels))
                learning_rate = scheduler.get_last_lr()[0]
                strategy.step(loss, optimizer, scheduler)
                profile.step()
                if strategy.is_main and strategy.global_step % 20 == 0:  # not in every step: item() waits for the GPU
                    bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
                if settings.checkpoint_every and strategy.global_step % settings.checkpoint_every == 0:
                    checkpoint.save()
                if strategy.global_step >= last_step:
                    break

        with strategy.evaluation(model), strategy.autocast():
            for pictures, labels in val:
                logits = model(pictures)
                val_loss.add(mean=F.cross_entropy(logits, labels), count=len(labels))
                val_accuracy.add(total=(logits.argmax(1) == labels).sum(), count=len(labels))
        metrics = {
            "epoch": epoch,
            "step": strategy.global_step,
            "train_loss": train_loss.value(),
            "val_loss": val_loss.value(),
            "val_accuracy": val_accuracy.value(),
            "val_count": val_accuracy.count(),
            "learning_rate": learning_rate,
            **throughput.read(),
        }
        folder.add(metrics)
        strategy.print(
            "epoch {epoch}: loss {train_loss:.4f}, validation loss {val_loss:.4f}, accuracy {val_accuracy:.2%}, "
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
    folder.close()
    strategy.print(f"results are in {folder.path}")
    strategy.close()


if __name__ == "__main__":
    main()
