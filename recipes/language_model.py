r"""Train a small GPT on text, byte by byte: the same model under every launcher.

    python recipes/language_model.py
    torchrun --nproc-per-node 2 recipes/language_model.py
    mpirun -np 2 python recipes/language_model.py

    torchrun --nproc-per-node 8 recipes/language_model.py --data books/ --layers 12 --width 768 --heads 12 \
        --context 1024 --batch-size 512 --strategy.precision bf16 --strategy.accumulate 4

By default, it trains on Python's own documentation: no download, no GPU, about a minute. --help lists all flags.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from tqdm import tqdm

import unitrain
from unitrain import Section, parse_command_line
from unitrain.recipes import gpt, text
from unitrain.recipes.learning_rate import LearningRate
from unitrain.recipes.run_folder import RunFolder, summarise

# Settings that may change when a run is resumed, because results don't depend on them.
MAY_CHANGE = {"strategy", "output_dir", "max_steps", "resume", "force", "prompt", "sample"}
Count = Annotated[int, Field(ge=1)]


class Settings(Section):
    """The recipe's settings; each is a flag, and a key in the file passed to --config."""

    data: str = "docs"
    """docs (Python's help topics), stdlib (Python's own source files), or the path of a text file or a folder."""
    layers: Count = 3
    """Number of blocks."""
    width: Count = 96
    """Size of a token's vector between the blocks."""
    heads: Count = 4
    """Attention heads of a block."""
    context: Count = 128
    """Most bytes that a prediction can depend on."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of dropout; 0.1 to 0.2 where a large model overfits."""
    epochs: Count = 6
    """Passes over the training text."""
    max_steps: Count | None = None
    """Stop after this many optimizer steps. The learning rate schedule is still planned for all epochs."""
    batch_size: Count = 16
    """Sequences per optimizer step, over all processes."""
    lr: Annotated[float, Field(gt=0)] = 4e-3
    """Peak learning rate of AdamW."""
    lr_floor: Annotated[float, Field(ge=0)] = 2e-4
    """Learning rate at the end of the cosine."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """Optimizer steps of linear warm-up to the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of AdamW, for matrices only."""
    prompt: str = "The "
    """Beginning of the sample that the trained model writes at the end."""
    sample: Annotated[int, Field(ge=0)] = 400
    """Length of that sample in bytes."""
    output_dir: Path | None = None
    """Folder of the results and checkpoints; a run in it is resumed. null creates a new one in runs/."""
    resume: str = "auto"
    """auto: from the newest checkpoint in output-dir, if any; never: from the beginning; or a checkpoint's PATH."""
    force: bool = False
    """Resume even if settings have changed since the checkpoint."""
    strategy: unitrain.StrategyConfig = unitrain.StrategyConfig(clip_norm=1.0)


def main() -> None:
    """Train, and measure the perplexity on held-out text after each epoch."""
    settings = parse_command_line(Settings, sys.argv[1:], prog="language_model.py", description="Train a small GPT.")
    strategy = unitrain.init(settings.strategy)

    documents = text.load(settings.data)
    train_set, val_set = (text.windows(part, settings.context) for part in documents)
    # The global batch size is fixed, so that results don't depend on the number of processes.
    train = strategy.dataloader(train_set, global_batch_size=settings.batch_size, shuffle=True)
    val = strategy.dataloader(val_set, global_batch_size=settings.batch_size)

    net = gpt.GPT(text.VOCABULARY, settings.context, settings.layers, settings.width, settings.heads, settings.dropout)
    rate = LearningRate(
        base=settings.lr, total_steps=settings.epochs * train.steps_per_epoch, warmup_steps=settings.warmup_steps,
        floor=settings.lr_floor,
    )  # fmt: skip
    groups = gpt.parameter_groups(net, settings.weight_decay)
    optimizer = torch.optim.AdamW(groups, rate.peak, betas=(0.9, 0.95), fused=True)
    model, optimizer, scheduler = strategy.prepare(net, optimizer, rate.scheduler(optimizer))

    folder = RunFolder(strategy, settings.output_dir, "language_model")
    summarise(strategy, settings.batch_size)
    counted = " and ".join(f"{value:.2f} ({name})" for name, value in text.baselines(documents).items())
    strategy.print(
        f"{sum(p.numel() for p in net.parameters())} parameters on {settings.data}: {sum(map(len, documents.train))} "
        f"bytes for training, {sum(map(len, documents.validation))} for validation\n"
        f"learning rate {rate}\nperplexity of models that count bytes: {counted}"
    )
    best = {"perplexity": math.inf}
    checkpoint = strategy.checkpoint(
        folder.path / "checkpoints",
        config=settings.model_dump(mode="json", exclude=MAY_CHANGE),
        model=model, optimizer=optimizer, scheduler=scheduler, loader=train, best=best,
    )  # fmt: skip
    if settings.resume == "never":
        checkpoint.discard()
    elif checkpoint.resume(None if settings.resume == "auto" else settings.resume, force=settings.force):
        strategy.print(f"resumed after step {strategy.global_step}, in epoch {train.epoch}")
    folder.begin(settings, strategy.global_step)
    throughput = strategy.throughput()
    last_step = settings.max_steps or math.inf
    for epoch in train.epochs(settings.epochs) if strategy.global_step < last_step else ():
        # Sums over tokens: sequences differ in length, so a mean of the batches' means would not be that of the tokens.
        train_loss, train_tokens, val_loss, val_tokens = (strategy.meter() for _ in range(4))
        for window, length in tqdm(train, f"epoch {epoch}", leave=False, mininterval=1, disable=not strategy.is_main):
            inputs, targets = text.inputs_and_targets(window, length)
            with strategy.autocast():
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            tokens = length.sum()
            train_loss.add(total=loss * tokens)
            train_tokens.add(total=tokens)
            learning_rate = scheduler.get_last_lr()[0]
            strategy.step(loss, optimizer, scheduler, weight=tokens)
            if strategy.global_step >= last_step:
                break

        with strategy.evaluation(model), strategy.autocast():
            for window, length in val:
                inputs, targets = text.inputs_and_targets(window, length)
                val_loss.add(total=F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum"))
                val_tokens.add(total=length.sum())
        metrics = {
            "epoch": epoch,
            "step": strategy.global_step,
            "train_perplexity": math.exp(train_loss.sum() / train_tokens.sum()),
            "val_perplexity": math.exp(val_loss.sum() / val_tokens.sum()),
            "val_tokens": int(val_tokens.sum()),
            "learning_rate": learning_rate,
            **throughput.read(),
        }
        folder.add(metrics)
        strategy.print(
            "epoch {epoch}: perplexity {train_perplexity:.3f}, validation perplexity {val_perplexity:.3f}, "
            "{samples_per_second:.0f} sequences/s".format(**metrics)
        )
        if metrics["val_perplexity"] < best["perplexity"]:
            best["perplexity"] = metrics["val_perplexity"]
            strategy.save(model, folder.path / "best.pt")
        checkpoint.save()
        if strategy.global_step >= last_step:
            break
    strategy.save(model, folder.path / "model.pt")
    folder.close()
    if strategy.is_main and settings.sample:
        written = gpt.generate(net, [text.BEGIN, *settings.prompt.encode()], settings.sample)
        print(f"---- a sample ----\n{settings.prompt}{bytes(written).decode(errors='replace')}\n----")
    strategy.print(f"best validation perplexity {best['perplexity']:.3f}; results are in {folder.path}")
    strategy.close()


if __name__ == "__main__":
    main()
