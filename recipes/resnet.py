r"""Train a ResNet to classify images. The same command trains the same network, whoever starts it.

    python recipes/resnet.py
    torchrun --nproc-per-node 2 recipes/resnet.py
    mpirun -np 2 python recipes/resnet.py
    horovodrun -np 2 python recipes/resnet.py
    srun -n 2 python recipes/resnet.py

    torchrun --nproc-per-node 8 recipes/resnet.py --model resnet50 --data imagefolder:imagenet --epochs 90 \
        --batch-size 1024 --lr-scaling linear --workers 8 --strategy.precision bf16

It learns handwritten digits by default, which needs no download, no GPU and less than a minute. --help lists all flags.
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

# Settings that train the same model whatever they are.
MAY_CHANGE = {
    "strategy", "output_dir", "data_dir", "workers", "max_steps", "checkpoint_every", "keep", "resume", "force",
    "profile",
}  # fmt: skip


class Settings(Section):
    """The recipe's settings; each is a flag, and a name in the file given to --config."""

    model: models.ModelName = "resnet8"
    """One of torchvision's ResNets, or resnet8, which is small enough for a CPU."""
    data: images.DataName = "digits"
    """Images to learn. PATH holds train/ and val/, each with a folder for every class; fake is N images of noise."""
    data_dir: Path = Path("data")
    """Folder of cifar10 and flowers102, which are downloaded into it once."""
    epochs: Annotated[int, Field(ge=1)] = 20
    """Times that the training set is seen."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """End after this many optimizer steps; the learning rate is still planned for all epochs."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Images of one optimizer step, over all processes."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Learning rate at its peak, before scaling."""
    lr_scaling: Scaling = "none"
    """Scale lr by batch-size / lr-reference-batch, by its root, or not."""
    lr_reference_batch: Annotated[int, Field(ge=1)] = 256
    """Batch size that lr is meant for, where lr is scaled."""
    lr_schedule: Schedule = "cosine"
    """From its peak, lr falls along half a cosine, to a tenth after each third of training, or not."""
    lr_floor: Annotated[float, Field(ge=0)] = 0.0
    """The schedule does not fall below this."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 1.0
    """Epochs, or a part of one, in which lr rises to its peak."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    """Weight decay of SGD."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that load images, for each training process; 0 loads them in the training process itself."""
    pretrained: str | None = None
    """Weights to begin with: a file of a state dict (model.pt of a run), or torchvision's for the model."""
    freeze_backbone: bool = False
    """Train the last layer only."""
    output_dir: Path | None = None
    """Folder of the results and checkpoints; a run in it is continued. null makes a new one in runs/."""
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps between checkpoints; null saves one after each epoch."""
    keep: Annotated[int, Field(ge=1)] = 3
    """Checkpoints to keep; the oldest go first."""
    resume: str = "auto"
    """auto continues from the newest checkpoint in output-dir, if any; never begins anew; else a checkpoint's PATH."""
    force: bool = False
    """Continue although settings have changed since the checkpoint."""
    profile: bool = False
    """Write what a few early steps spend their time on to trace-rankN.json in output-dir, for Chrome's tracing."""
    strategy: unitrain.StrategyConfig = unitrain.StrategyConfig()


def main() -> None:
    """Train, and evaluate after each epoch."""
    settings = parse_command_line(Settings, sys.argv[1:], prog="resnet.py", description="Train a ResNet on images.")
    strategy = unitrain.init(settings.strategy)

    with strategy.main_first():  # one process downloads; then the others find the files
        data = images.load(settings.data, settings.data_dir, models.image_size(settings.model))
    # The global batch is fixed, so that a run does not depend on how many processes share it.
    loading: dict[str, Any] = {"num_workers": settings.workers, "persistent_workers": settings.workers > 0}
    train = strategy.dataloader(data.train, global_batch_size=settings.batch_size, shuffle=True, **loading)
    val = strategy.dataloader(data.validation, global_batch_size=settings.batch_size, **loading)

    model = models.build(settings.model, data.classes)
    if settings.pretrained:
        fresh = models.load_pretrained(model, settings.model, settings.pretrained, strategy)
        strategy.print(f"pretrained {settings.pretrained}, but for layers not in it or of another shape: {fresh}")
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
        f"{settings.model} on {settings.data}: {len(data.train)} images of {data.classes} classes to train on, "
        f"{len(data.validation)} to validate\nlearning rate {rate}"
    )
    checkpoint = strategy.checkpoint(
        folder.path / "checkpoints",
        config=settings.model_dump(mode="json", exclude=MAY_CHANGE), keep=settings.keep,
        model=model, optimizer=optimizer, scheduler=scheduler, loader=train,
    )  # fmt: skip
    if settings.resume == "never":
        checkpoint.discard()
    elif checkpoint.resume(None if settings.resume == "auto" else settings.resume, force=settings.force):
        strategy.print(f"continuing after step {strategy.global_step}, in epoch {train.epoch}")
    folder.begin(settings, strategy.global_step)
    throughput, profile = strategy.throughput(), folder.profile(settings.profile)
    last_step = settings.max_steps or math.inf
    for epoch in train.epochs(settings.epochs) if strategy.global_step < last_step else ():
        # Meters add up on the device; their values, over all ranks, are read once an epoch.
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
                if (
                    strategy.is_main and strategy.global_step % 20 == 0
                ):  # not always: to read a loss waits for the device
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
        strategy.print("nothing was left to train: begin anew with --resume never, or go on with more --epochs --force")
    strategy.save(model, folder.path / "model.pt")
    folder.close()
    strategy.print(f"Results are in {folder.path}")
    strategy.close()


if __name__ == "__main__":
    main()
