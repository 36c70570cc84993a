r"""Train a GAN, two models with an optimizer each: the same networks under every launcher.

    python recipes/gan.py
    torchrun --nproc-per-node 2 recipes/gan.py
    mpirun -np 2 python recipes/gan.py
    horovodrun -np 2 python recipes/gan.py
    srun -n 2 python recipes/gan.py

It generates handwritten digits: no download, no GPU, about a minute. --help lists all flags.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch.utils.data import TensorDataset
from torchvision.utils import save_image
from tqdm import tqdm

import unitrain
from unitrain import Section, parse_command_line
from unitrain.recipes.generative.data import Digits, frechet_distance, independent_pixels
from unitrain.recipes.generative.models import LATENT, Discriminator, Generator
from unitrain.recipes.shared.run_folder import RunFolder, resume_or_discard, summarise

# Settings that may change when a run is resumed, because results don't depend on them.
MAY_CHANGE = {"strategy", "output_dir", "max_steps", "resume", "force"}
GENERATED = 1000  # images that are compared with the real ones


class Settings(Section):
    """The recipe's settings; each is a flag, and a key in the file passed to --config."""

    epochs: Annotated[int, Field(ge=1)] = 60
    """Passes over the training set."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Stop after this many batches."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Images per step, over all processes."""
    lr: Annotated[float, Field(gt=0)] = 2e-3
    """Learning rate of both networks."""
    evaluate_every: Annotated[int, Field(ge=1)] = 5
    """Epochs between evaluations, each of which also saves a checkpoint."""
    output_dir: Path | None = None
    """Folder of the results and checkpoints; a run in it is resumed. null creates a new one in runs/."""
    resume: str = "auto"
    """auto: from the newest checkpoint in output-dir, if any; never: from the beginning; or a checkpoint's PATH."""
    force: bool = False
    """Resume even if settings have changed since the checkpoint."""
    strategy: unitrain.StrategyConfig = unitrain.StrategyConfig()


def generate(strategy: unitrain.Strategy, generator: torch.nn.Module, latents: unitrain.Loader) -> torch.Tensor:
    """Return an image for each latent vector, on every rank. Collective."""
    with strategy.evaluation(generator), strategy.autocast():
        return torch.cat([strategy.gather(generator(latent)) for (latent,) in latents])


def main() -> None:
    """Train both networks in turns, and compare generated images with real ones."""
    settings = parse_command_line(Settings, sys.argv[1:], prog="gan.py", description="Train a GAN on digits.")
    strategy = unitrain.init(settings.strategy)

    digits, unseen = Digits(training=True), Digits(training=False).images
    train = strategy.dataloader(digits, global_batch_size=settings.batch_size, shuffle=True)
    # The same vectors in every evaluation.
    fixed = torch.randn(GENERATED, LATENT, generator=torch.Generator().manual_seed(1))
    latents = strategy.dataloader(TensorDataset(fixed), global_batch_size=GENERATED)

    generator, discriminator = Generator(), Discriminator()
    g_optimizer = torch.optim.Adam(generator.parameters(), settings.lr, betas=(0.5, 0.999), fused=True)
    d_optimizer = torch.optim.Adam(discriminator.parameters(), settings.lr, betas=(0.5, 0.999), fused=True)
    generator, discriminator, g_optimizer, d_optimizer = strategy.prepare(
        generator, discriminator, g_optimizer, d_optimizer
    )

    folder = RunFolder(strategy, settings.output_dir, "gan")
    summarise(strategy, settings.batch_size)
    checkpoint = strategy.checkpoint(
        folder.path / "checkpoints", config=settings.model_dump(mode="json", exclude=MAY_CHANGE), loader=train,
        generator=generator, discriminator=discriminator, g_optimizer=g_optimizer, d_optimizer=d_optimizer,
    )  # fmt: skip
    resume_or_discard(checkpoint, settings.resume, force=settings.force)
    folder.begin(settings, strategy.global_step)
    noise = independent_pixels(digits.images, GENERATED)
    strategy.print(
        f"Fréchet distance to {len(unseen)} digits: of {len(digits)} other digits "
        f"{frechet_distance(digits.images, unseen):.2f}, of noise {frechet_distance(noise, unseen):.2f}, of the "
        f"generator's images {frechet_distance(generate(strategy, generator, latents), unseen):.2f}"
    )
    last_step = 2 * settings.max_steps if settings.max_steps else math.inf  # each batch is a step of both optimizers
    for epoch in train.epochs(settings.epochs) if strategy.global_step < last_step else ():
        g_loss, d_loss = strategy.meter(), strategy.meter()
        bar = tqdm(train, f"epoch {epoch}", leave=False, mininterval=1, disable=not strategy.is_main or None)
        for real, latent in bar:
            with strategy.autocast():
                fake = generator(latent)
                is_real, is_fake = discriminator(torch.cat([real, fake.detach()])).chunk(2)
                loss = F.softplus(-is_real).mean() + F.softplus(is_fake).mean()
            strategy.step(loss, d_optimizer)
            d_loss.add(mean=loss, count=len(real))
            with strategy.autocast():
                loss = F.softplus(-discriminator(fake)).mean()  # is it taken for real?
            strategy.step(loss, g_optimizer)
            g_loss.add(mean=loss, count=len(real))
            if strategy.global_step >= last_step:
                break
        ended = strategy.global_step >= last_step or epoch + 1 == settings.epochs
        if ended or (epoch + 1) % settings.evaluate_every == 0:
            images = generate(strategy, generator, latents)
            metrics = {
                "epoch": epoch, "step": strategy.global_step, "g_loss": g_loss.value(), "d_loss": d_loss.value(),
                "frechet_distance": frechet_distance(images, unseen),
            }  # fmt: skip
            folder.add(metrics)
            strategy.print(
                "epoch {epoch}: generator's loss {g_loss:.3f}, discriminator's {d_loss:.3f}, Fréchet distance "
                "{frechet_distance:.2f}".format(**metrics)
            )
            if strategy.is_main:
                enlarged = F.interpolate(images[:64].float(), scale_factor=4)
                save_image(enlarged, folder.path / "generated.png", value_range=(-1, 1), normalize=True)
            checkpoint.save()
        if ended:
            break
    else:
        strategy.print("training is complete: start again with --resume never, or train longer: --epochs N --force")
    strategy.save(generator, folder.path / "model.pt")
    if strategy.is_main:
        from unitrain.recipes.shared.figures import draw_curves  # takes as long to import as torch

        draw_curves(folder.path, {"loss": ["g_loss", "d_loss"], "Fréchet distance": ["frechet_distance"]})
    folder.close()
    strategy.print(f"results are in {folder.path}")
    strategy.close()


if __name__ == "__main__":
    main()
