r"""Train a small GPT on text, byte by byte: the same model under every launcher.

    python recipes/language_model.py
    torchrun --nproc-per-node 2 recipes/language_model.py
    mpirun -np 2 python recipes/language_model.py

    torchrun --nproc-per-node 8 recipes/language_model.py --data books/ --layers 12 --width 768 --heads 12 \
        --context 1024 --batch-size 512 --strategy.precision bf16 --strategy.accumulate 4

By default, it trains on Python's own documentation: no download, no GPU, a minute or two. --help lists all flags.
"""

from __future__ import annotations

import math
import sys
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from tqdm import tqdm

import unitrain
from unitrain import parse_command_line
from unitrain.features.profile import Profile
from unitrain.features.throughput import Throughput
from unitrain.recipes.shared import figures
from unitrain.recipes.shared.run_folder import RunFolder, resume_or_discard, summarise
from unitrain.recipes.shared.settings import TrainingSettings
from unitrain.recipes.text import data as text
from unitrain.recipes.text import gpt


class Settings(TrainingSettings):
    """The recipe's settings; each is a flag, and a key in the file passed to --config."""

    MAY_CHANGE: ClassVar[frozenset[str]] = TrainingSettings.MAY_CHANGE | {"prompt", "sample"}

    data: str = "docs"
    """docs (Python's help topics), stdlib (Python's own source files), or the path of a text file or a folder."""
    layers: Annotated[int, Field(ge=1)] = 3
    """Number of blocks."""
    width: Annotated[int, Field(ge=1)] = 96
    """Size of a token's vector between the blocks."""
    heads: Annotated[int, Field(ge=1)] = 4
    """Attention heads of a block."""
    context: Annotated[int, Field(ge=1)] = 128
    """Most bytes that a prediction can depend on."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of dropout; 0.1 to 0.2 where a large model overfits."""
    epochs: Annotated[int, Field(ge=1)] = 6
    """Passes over the training text."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Sequences per optimizer step, over all processes."""
    lr: Annotated[float, Field(gt=0)] = 4e-3
    """Peak learning rate of AdamW, before scaling."""
    lr_floor: Annotated[float, Field(ge=0)] = 2e-4
    """Lowest learning rate of the schedule."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.24
    """Epochs (fractions allowed) of linear warm-up to the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of AdamW, for matrices only."""
    prompt: str = "The "
    """Beginning of the sample that the trained model writes at the end."""
    sample: Annotated[int, Field(ge=0)] = 400
    """Length of that sample in bytes."""
    strategy: unitrain.StrategyConfig = unitrain.StrategyConfig(clip_norm=1.0)


def main() -> None:
    """Train, and measure the perplexity on held-out text after each epoch."""
    settings = parse_command_line(Settings, sys.argv[1:], prog="language_model.py", description="Train a small GPT.")
    strategy = unitrain.init(settings.strategy)

    documents = text.load(settings.data)
    train_set, val_set = (text.windows(part, settings.context) for part in documents)
    # The global batch size is fixed, so that results don't depend on the number of processes.
    train = strategy.dataloader(train_set, shuffle=True, **settings.loading())
    val = strategy.dataloader(val_set, **settings.loading())

    net = gpt.GPT(text.VOCABULARY, settings.context, settings.layers, settings.width, settings.heads, settings.dropout)
    rate = settings.learning_rate(train.steps_per_epoch)
    groups = gpt.parameter_groups(net, settings.weight_decay)
    optimizer = torch.optim.AdamW(groups, rate.peak, betas=(0.9, 0.95), fused=True)
    model, optimizer, scheduler = strategy.prepare(net, optimizer, rate.scheduler(optimizer))

    folder = RunFolder(strategy, settings.output_dir, "language_model", settings.tracker)
    summarise(strategy, settings.batch_size)
    counted = " and ".join(f"{value:.2f} ({name})" for name, value in text.baselines(documents).items())
    strategy.print(
        f"{sum(p.numel() for p in net.parameters())} parameters on {settings.data}: {sum(map(len, documents.train))} "
        f"bytes for training, {sum(map(len, documents.validation))} for validation\n"
        f"learning rate {rate}\nperplexity of models that count bytes: {counted}"
    )
    progress = {"best_perplexity": math.inf}
    checkpoint = strategy.checkpoint(
        folder.path / "checkpoints", config=settings.decisive(), keep=settings.keep,
        model=model, optimizer=optimizer, scheduler=scheduler, loader=train, progress=progress,
    )  # fmt: skip
    resume_or_discard(checkpoint, settings.resume, force=settings.force)
    folder.begin(settings, strategy.global_step)

    group = strategy.batch_group  # ranks that have the same sequences, and each a part of them; or this rank alone

    def loss_of(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of this rank's tokens, and their number."""
        inputs, targets = text.inputs_and_targets(*batch)  # and then in parts, so that no target is lost between two
        targets = group.part(targets, 1)
        with strategy.autocast():
            total = F.cross_entropy(model(inputs, group).flatten(0, 1), targets.flatten(), reduction="sum")
        return total, (targets != text.IGNORED).sum()

    throughput, last_step = strategy.add(Throughput()), settings.last_step
    if settings.profile:
        strategy.add(Profile(folder.path))
    for epoch in train.epochs(settings.epochs) if strategy.global_step < last_step else ():
        # Sums over tokens: sequences differ in length, so a mean of the batches' means would not be that of the tokens.
        train_loss, train_tokens, val_loss, val_tokens = (strategy.meter() for _ in range(4))
        bar = tqdm(train, f"epoch {epoch}", leave=False, mininterval=1, disable=not strategy.is_main or None)
        for batch in bar:
            total, tokens = loss_of(batch)
            train_loss.add(total=total)
            train_tokens.add(total=tokens)
            strategy.step(total / tokens.clamp(min=1), optimizer, scheduler, weight=tokens)
            if settings.checkpoint_every and strategy.global_step % settings.checkpoint_every == 0:
                checkpoint.save()
            if strategy.global_step >= last_step:
                break

        with strategy.evaluation(model):
            for batch in val:
                total, tokens = loss_of(batch)
                val_loss.add(total=total)
                val_tokens.add(total=tokens)
        metrics = {
            "epoch": epoch,
            "step": strategy.global_step,
            "train_perplexity": math.exp(train_loss.sum() / train_tokens.sum()),
            "val_perplexity": math.exp(val_loss.sum() / val_tokens.sum()),
            # The ranks of a group have the same samples, so a meter divides what they add by their number.
            "val_tokens": round(val_tokens.sum() * group.size),
            "learning_rate": rate.at(strategy.global_step - 1),
            **throughput.read(),
        }
        folder.add(metrics)
        strategy.print(
            "epoch {epoch}: perplexity {train_perplexity:.3f}, validation perplexity {val_perplexity:.3f}, "
            "{samples_per_second:.0f} sequences/s".format(**metrics)
        )
        if metrics["val_perplexity"] < progress["best_perplexity"]:
            progress["best_perplexity"] = metrics["val_perplexity"]
            strategy.save(model, folder.path / "best.pt")
        if not settings.checkpoint_every or strategy.global_step >= last_step or epoch + 1 == settings.epochs:
            checkpoint.save()
        if strategy.global_step >= last_step:
            break
    strategy.save(model, folder.path / "model.pt")
    # By all ranks, which may each have a part of the weights.
    written = gpt.generate(net, [text.BEGIN, *settings.prompt.encode()], settings.sample)
    if strategy.is_main:
        figures.draw_curves(folder.path, {"perplexity": ["train_perplexity", "val_perplexity"]})
        print(f"---- a sample ----\n{settings.prompt}{bytes(written).decode(errors='replace')}\n----")
    folder.close()
    strategy.print(f"best validation perplexity {progress['best_perplexity']:.3f}; results are in {folder.path}")
    strategy.close()


if __name__ == "__main__":
    main()
