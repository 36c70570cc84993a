r"""Train a speaker recogniser: the same network under every launcher.

    python recipes/speaker.py
    torchrun --nproc-per-node 2 recipes/speaker.py
    mpirun -np 2 python recipes/speaker.py

    torchrun --nproc-per-node 8 recipes/speaker.py --data voxceleb:data --model resnetse34l --batch-size 400 \
        --seconds 2 --test-seconds 4 --test-crops 10 --epochs 500 --lr 0.001 --workers 8 --strategy.sync-batchnorm true

By default, it trains on synthetic speech: no download, no GPU, about a minute. --help lists all flags.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from tqdm import tqdm

from unitrain import ConfigError, init, parse_command_line
from unitrain.features.profile import Profile
from unitrain.features.throughput import Throughput
from unitrain.recipes.shared import figures
from unitrain.recipes.shared.run_folder import RunFolder, resume_or_discard, summarise
from unitrain.recipes.shared.settings import TrainingSettings
from unitrain.recipes.speaker_verification import losses as speaker_losses
from unitrain.recipes.speaker_verification import model as speaker_model
from unitrain.recipes.speaker_verification import speech
from unitrain.recipes.speaker_verification.batches import SpeakerBatches
from unitrain.recipes.speaker_verification.verification import verify


class Settings(TrainingSettings):
    """The recipe's settings; each is a flag, and a key in the file passed to --config."""

    MAY_CHANGE: ClassVar[frozenset[str]] = TrainingSettings.MAY_CHANGE | {"data_dir"}

    model: speaker_model.ModelName = "resnetse10"
    """resnetse34l is ResNetSE34L of voxceleb_trainer; resnetse10 is small enough for a CPU."""
    loss: speaker_losses.LossName = "angleproto"
    """The last three compare the speakers of a batch: of the global batch, on any number of processes."""
    margin: Annotated[float, Field(ge=0, lt=1.5)] = 0.2
    """Margin of amsoftmax (of the cosine) and aamsoftmax (of the angle, in radians)."""
    scale: Annotated[float, Field(gt=0)] = 30.0
    """Factor of the cosine in amsoftmax and aamsoftmax."""
    data: speech.DataName = "synthetic"
    """Speech. PATH has voxceleb2/ for training and voxceleb1/ for trials, each with SPEAKER/VIDEO/FILE.wav."""
    train_list: Path = Path("train_list.txt")
    """Utterances to train on, relative to PATH: lines SPEAKER FILE."""
    trial_list: Path = Path("test_list.txt")
    """Trials, relative to PATH: lines 1 FILE FILE (one speaker) or 0 FILE FILE (two speakers)."""
    data_dir: Path = Path("data")
    """Folder in which the synthetic speech is made once."""
    seconds: Annotated[float, Field(ge=0.1, le=60)] = 1.0
    """Length of the random crop of an utterance in training."""
    test_seconds: Annotated[float, Field(ge=0.1, le=60)] = 1.0
    """Length of a crop in a trial."""
    test_crops: Annotated[int, Field(ge=1)] = 3
    """Evenly spaced crops of an utterance in a trial; the score is the mean over all pairs of crops."""
    utterances_per_speaker: Annotated[int, Field(ge=1)] = 2
    """Utterances of each speaker in a batch."""
    most_per_speaker: Annotated[int, Field(ge=1)] = 500
    """At most so many utterances of a speaker are used in an epoch."""
    epochs: Annotated[int, Field(ge=1)] = 30
    """Passes over the training set."""
    lr: Annotated[float, Field(gt=0)] = 0.004
    """Peak learning rate of Adam, before scaling."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of Adam."""


def main() -> None:
    """Train, and compute the error rates on the trials after each epoch."""
    settings = parse_command_line(Settings, sys.argv[1:], prog="speaker.py", description="Train a speaker recogniser.")
    strategy = init(settings.strategy)

    with strategy.main_first():  # one process makes the synthetic speech; then the others find the files
        data = speech.load(settings.data, settings.data_dir, settings.train_list, settings.trial_list)
    # The global batches are fixed, so that results don't depend on the number of processes.
    batches = SpeakerBatches(
        data.speakers, settings.batch_size, settings.utterances_per_speaker, settings.most_per_speaker
    )
    crops = speech.TrainingCrops(data.files, data.speakers, settings.seconds)
    train = strategy.dataloader(crops, batch_sampler=batches, **settings.reading())
    trial_crops = speech.TrialCrops(data.trials.files, settings.test_seconds, settings.test_crops)
    test = strategy.dataloader(trial_crops, **settings.loading())

    model, speakers = speaker_model.build(settings.model), max(data.speakers) + 1
    criterion = speaker_losses.build(
        settings.loss, dimensions=model.dimensions, speakers=speakers, utterances=settings.utterances_per_speaker,
        margin=settings.margin, scale=settings.scale,
    )  # fmt: skip
    if criterion.compare and strategy.config.accumulate > 1:
        raise ConfigError(f"loss {settings.loss} compares all speakers of a batch: set strategy.accumulate to 1.")
    rate, trained = settings.learning_rate(len(batches)), [*model.parameters(), *criterion.head.parameters()]
    optimizer = torch.optim.Adam(trained, rate.peak, weight_decay=settings.weight_decay, fused=True)
    model, head, optimizer, scheduler = strategy.prepare(model, criterion.head, optimizer, rate.scheduler(optimizer))

    folder = RunFolder(strategy, settings.output_dir, "speaker", settings.tracker)
    summarise(strategy, settings.batch_size)
    strategy.print(
        f"{settings.model} with {settings.loss} on {settings.data}: {len(crops)} utterances of {speakers} speakers for "
        f"training, {len(trial_crops)} in {len(data.trials.same)} trials\nlearning rate {rate}"
    )
    checkpoint = strategy.checkpoint(
        folder.path / "checkpoints", config=settings.decisive(), keep=settings.keep,
        model=model, head=head, optimizer=optimizer, scheduler=scheduler, loader=train,
    )  # fmt: skip
    resume_or_discard(checkpoint, settings.resume, force=settings.force)
    folder.begin(settings, strategy.global_step or -1)  # the line of step 0 is written below
    if strategy.global_step == 0:
        untrained = verify(strategy, model, test, data.trials)
        folder.add({"epoch": -1, "step": 0, **untrained._asdict()})
        strategy.print(f"untrained: equal error rate {untrained.eer:.2%}, minDCF {untrained.min_dcf:.3f}")
    throughput, last_step = strategy.add(Throughput()), settings.last_step
    if settings.profile:
        strategy.add(Profile(folder.path))
    for epoch in train.epochs(settings.epochs) if strategy.global_step < last_step else ():
        mean_loss = strategy.meter()
        with tqdm(train, f"epoch {epoch}", leave=False, mininterval=1, disable=not strategy.is_main or None) as bar:
            for waveforms, labels in bar:
                with strategy.autocast():
                    embeddings = model(waveforms)
                    if criterion.compare:  # speakers with each other: those of all processes
                        pair = embeddings, labels
                        embeddings, labels = strategy.gather(pair, differentiable=True, in_order=train)
                    loss = criterion(head, embeddings, labels)
                mean_loss.add(mean=loss, count=len(waveforms))
                strategy.step(loss, optimizer, scheduler)
                if settings.checkpoint_every and strategy.global_step % settings.checkpoint_every == 0:
                    checkpoint.save()
                if strategy.global_step >= last_step:
                    break

        metrics = {"epoch": epoch, "step": strategy.global_step, "train_loss": mean_loss.value()}
        metrics |= verify(strategy, model, test, data.trials)._asdict()
        metrics |= {"learning_rate": rate.at(strategy.global_step - 1), **throughput.read()}
        folder.add(metrics)
        strategy.print(
            "epoch {epoch}: loss {train_loss:.4f}, equal error rate {eer:.2%}, minDCF {min_dcf:.3f}, "
            "{samples_per_second:.0f} utterances/s".format(**metrics)
        )
        ended = strategy.global_step >= last_step or epoch + 1 == settings.epochs
        if ended or not settings.checkpoint_every:
            checkpoint.save()
        if ended:
            curves = {"loss": ["train_loss"], "error rate on trials": ["eer"]}
            strategy.on_main(lambda: figures.draw_curves(folder.path, curves))  # noqa: B023
            break
    else:
        strategy.print("training is complete: start again with --resume never, or train longer: --epochs N --force")
    strategy.save(model, folder.path / "model.pt")
    folder.close()
    strategy.print(f"results are in {folder.path}")
    strategy.close()


if __name__ == "__main__":
    main()
