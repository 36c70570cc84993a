r"""Train a ResNet to classify images: the same network under every launcher.

    python recipes/resnet.py
    torchrun --nproc-per-node 2 recipes/resnet.py
    mpirun -np 2 python recipes/resnet.py           # or horovodrun -np 2, or srun -n 2
    torchrun --nproc-per-node 8 recipes/resnet.py --model resnet50 --data imagefolder:imagenet --epochs 90 \
        --batch-size 1024 --lr-scaling linear --workers 8 --strategy.precision bf16
    python recipes/resnet.py --predict photo.jpg --output-dir runs/NAME

By default, it trains on handwritten digits: no download, no GPU, less than a minute. --help lists all flags.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from tqdm import tqdm

from unitrain import Strategy, init, parse_command_line
from unitrain.features.profile import Profile
from unitrain.features.throughput import Throughput
from unitrain.recipes.image_classification import images, models, prediction
from unitrain.recipes.shared import figures
from unitrain.recipes.shared.run_folder import RunFolder, resume_or_discard, summarise
from unitrain.recipes.shared.settings import TrainingSettings


class Settings(TrainingSettings):
    """The recipe's settings; each is a flag, and a key in the file passed to --config."""

    MAY_CHANGE: ClassVar[frozenset[str]] = TrainingSettings.MAY_CHANGE | {"data_dir", "evaluate", "predict"}

    model: models.ModelName = "resnet8"
    """One of torchvision's ResNets, or resnet8, which is small enough for a CPU."""
    data: images.DataName = "digits"
    """Images. PATH has a folder per class, or train/ and val/ with such folders; fake is N images of noise."""
    data_dir: Path = Path("data")
    """Folder into which cifar10 and flowers102 are downloaded once."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Part of each class that is for validation, where the data is not split already."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing of the loss in training."""
    pretrained: str | None = None
    """Weights to start from: a file with a state dict (a run's model.pt), or torchvision for its pretrained ones."""
    freeze_backbone: bool = False
    """Train the last layer only."""
    evaluate: bool = False
    """Only evaluate: the checkpoint that a run in output-dir would resume from, or the pretrained weights."""
    predict: Path | None = None
    """Only print the most probable classes of this image, by the best weights of the run in output-dir."""


def train_epoch(strategy: Strategy, settings: Settings, epoch: int, train: Any, state: tuple[Any, ...]) -> float:
    """Train on what is left of an epoch, and return the mean loss over its samples. Collective."""
    mean_loss, (model, optimizer, scheduler, checkpoint) = strategy.meter(), state
    with tqdm(train, f"epoch {epoch}", leave=False, mininterval=1, disable=not strategy.is_main or None) as bar:
        for pictures, labels in bar:
            with strategy.autocast():
                loss = F.cross_entropy(model(pictures), labels, label_smoothing=settings.label_smoothing)
            mean_loss.add(mean=loss, count=len(labels))
            strategy.step(loss, optimizer, scheduler)
            if strategy.is_main and strategy.global_step % 20 == 0:  # not in every step: item() waits for the GPU
                bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            if settings.checkpoint_every and strategy.global_step % settings.checkpoint_every == 0:
                checkpoint.save()
            if strategy.global_step == settings.max_steps:
                break
    return mean_loss.value()


def evaluate(strategy: Strategy, model: Any, val: Any) -> tuple[dict[str, float], torch.Tensor, torch.Tensor]:
    """Return metrics over the validation set, the labels, and the predicted classes. Collective."""
    # Meters accumulate on the device; their values over all ranks are read once, at the end.
    loss, accuracy, top5, pairs = strategy.meter(), strategy.meter(), strategy.meter(), []
    with strategy.evaluation(model), strategy.autocast():
        for pictures, labels in val:
            logits = model(pictures)
            best = logits.topk(min(5, logits.size(1))).indices
            loss.add(mean=F.cross_entropy(logits, labels), count=len(labels))
            accuracy.add(total=(best[:, 0] == labels).sum(), count=len(labels))
            top5.add(total=(best == labels[:, None]).sum(), count=len(labels))
            pairs.append(torch.stack([labels, best[:, 0]], dim=1))
    own = torch.cat(pairs) if pairs else torch.empty(0, 2, dtype=torch.int64)  # a rank may have no sample
    labels, predicted = strategy.gather(own.to(strategy.device)).T
    values = {"val_loss": loss, "val_accuracy": accuracy, "val_top5_accuracy": top5}
    return {name: meter.value() for name, meter in values.items()} | {"val_count": loss.count()}, labels, predicted


def main() -> None:
    """Train, and evaluate after each epoch."""
    settings = parse_command_line(Settings, sys.argv[1:], prog="resnet.py", description="Train a ResNet on images.")
    strategy = init(settings.strategy)
    if settings.predict is not None:
        prediction.show(strategy, settings.output_dir, settings.predict)
        strategy.close()
        return

    with strategy.main_first():  # one process downloads; then the others find the files
        data = images.load(settings.data, settings.data_dir, models.image_size(settings.model), settings.val_fraction)
    # The global batch size is fixed, so that results don't depend on the number of processes.
    train = strategy.dataloader(data.train, shuffle=True, **settings.loading())
    val = strategy.dataloader(data.validation, **settings.loading())

    model = models.build(settings.model, len(data.classes))
    if settings.pretrained:
        fresh = models.load_pretrained(model, settings.model, settings.pretrained, strategy)
        strategy.print(f"pretrained {settings.pretrained}; layers with random weights: {', '.join(fresh) or 'none'}")
    if settings.freeze_backbone:
        models.freeze_backbone(model)
    rate, trained = settings.learning_rate(train.steps_per_epoch), [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, rate.peak, settings.momentum, weight_decay=settings.weight_decay, fused=True)
    model, optimizer, scheduler = strategy.prepare(model, optimizer, rate.scheduler(optimizer))

    folder = RunFolder(strategy, settings.output_dir, "resnet", settings.tracker)
    summarise(strategy, settings.batch_size)
    strategy.print(
        f"{settings.model} on {settings.data}: {len(data.train)} images for training, {len(data.validation)} for "
        f"validation, {len(data.classes)} classes\nlearning rate {rate}"
    )
    progress = {"best_accuracy": 0.0}
    checkpoint = strategy.checkpoint(
        folder.path / "checkpoints", config=settings.decisive(), keep=settings.keep,
        model=model, optimizer=optimizer, scheduler=scheduler, loader=train, progress=progress,
    )  # fmt: skip
    resume_or_discard(checkpoint, settings.resume, force=settings.force, discards=not settings.evaluate)
    if settings.evaluate:
        strategy.print(*(f"{name} {value:.4f}" for name, value in evaluate(strategy, model, val)[0].items()))
        folder.close()
        strategy.close()
        return
    folder.begin(settings, strategy.global_step)
    strategy.on_main(lambda: prediction.write_classes(folder.path, data.classes))
    throughput, last_step = strategy.add(Throughput()), settings.last_step
    if settings.profile:
        strategy.add(Profile(folder.path))
    for epoch in train.epochs(settings.epochs) if strategy.global_step < last_step else ():
        loss = train_epoch(strategy, settings, epoch, train, (model, optimizer, scheduler, checkpoint))
        metrics, labels, predicted = evaluate(strategy, model, val)
        rates = {"learning_rate": rate.at(strategy.global_step - 1), **throughput.read()}
        metrics |= {"epoch": epoch, "step": strategy.global_step, "train_loss": loss, **rates}
        folder.add(metrics)
        strategy.print(
            "epoch {epoch}: loss {train_loss:.4f}, validation loss {val_loss:.4f}, accuracy {val_accuracy:.2%}, "
            "{samples_per_second:.0f} images/s".format(**metrics)
        )
        if improved := metrics["val_accuracy"] > progress["best_accuracy"]:
            progress["best_accuracy"] = metrics["val_accuracy"]
            strategy.save(model, folder.path / "best.pt")
        ended = strategy.global_step >= last_step or epoch + 1 == settings.epochs
        if improved or ended or not settings.checkpoint_every:
            checkpoint.save(best=improved)
        if ended:
            strategy.on_main(lambda: figures.draw_classification(folder.path, labels, predicted, data.classes))  # noqa: B023
            break
    else:
        strategy.print("training is complete: start again with --resume never, or train longer: --epochs N --force")
    strategy.save(model, folder.path / "model.pt")
    folder.close()
    strategy.print(f"results are in {folder.path}")
    strategy.close()


if __name__ == "__main__":
    main()
