r"""UniTrain within a trainer class of your own, with callbacks: it classifies handwritten digits with a small MLP.

    python recipes/custom_trainer.py
    torchrun --nproc-per-node 2 recipes/custom_trainer.py
    mpirun -np 2 python recipes/custom_trainer.py

The trainer is given a strategy, and everything that differs between one process and many goes through that.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

import unitrain
from unitrain import Section, Strategy, parse_command_line
from unitrain.recipes.image_classification import images


class Callback:
    """Is called on every rank, with the same numbers: so all ranks decide alike. ``state`` is saved and resumed."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """React to the metrics of an epoch."""

    def stops(self) -> bool:
        """Return whether training should end before the next epoch."""
        return False


class Log(Callback):
    """Prints the metrics, and appends them to ``metrics.jsonl``."""

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Print and write, on rank 0 only."""
        trainer.strategy.print(", ".join(f"{name} {value:.5g}" for name, value in metrics.items()))
        if trainer.strategy.is_main:
            with (trainer.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics) + "\n")


class KeepBest(Callback):
    """Saves the weights to ``best.pt`` after each epoch that is better than all before it."""

    def __init__(self, metric: str) -> None:
        super().__init__()
        self.metric: str = metric
        self.state: dict[str, Any] = {"best": -math.inf}

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Save the weights if they are the best."""
        if metrics[self.metric] > self.state["best"]:
            self.state["best"] = metrics[self.metric]
            trainer.save("best.pt")


class EarlyStopping(Callback):
    """Ends the training after ``patience`` epochs without an improvement."""

    def __init__(self, metric: str, patience: int) -> None:
        super().__init__()
        self.metric: str = metric
        self.patience: int = patience
        self.state: dict[str, Any] = {"best": -math.inf, "waited": 0}

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Count the epochs since the best one."""
        if metrics[self.metric] > self.state["best"]:
            self.state.update(best=metrics[self.metric], waited=0)
        else:
            self.state["waited"] += 1

    def stops(self) -> bool:
        """Return whether the patience is exhausted."""
        return bool(self.state["waited"] >= self.patience)


class Trainer:
    """Trains a model. Only the lines that name ``strategy`` would be others in a trainer for one process.

    Args:
        strategy: runs the training on however many processes there are.
        model: the model.
        optimizer: the optimizer of its parameters.
        loss: returns the mean loss of predictions and labels.
        folder: the folder of the results.
        callbacks: are called in this order.
    """

    strategy: Strategy
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]
    folder: Path
    callbacks: Sequence[Callback]

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor], folder: Path, callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        self.strategy, self.loss, self.folder, self.callbacks = strategy, loss, folder, callbacks
        self.model, self.optimizer = strategy.prepare(model, optimizer)

    def fit(self, train_set: Any, validation_set: Any, epochs: int, batch_size: int) -> None:
        """Train, or continue from the checkpoint in the folder. ``batch_size`` is that of all processes together."""
        train = self.strategy.dataloader(train_set, global_batch_size=batch_size, shuffle=True)
        states: dict[str, Any] = {type(callback).__name__: callback.state for callback in self.callbacks}
        checkpoint = self.strategy.checkpoint(
            self.folder / "checkpoints", model=self.model, optimizer=self.optimizer, loader=train, **states
        )
        checkpoint.resume()
        for epoch in train.epochs(epochs):
            if any(callback.stops() for callback in self.callbacks):
                break
            losses = self.strategy.meter()
            for inputs, labels in train:
                with self.strategy.autocast():
                    loss = self.loss(self.model(inputs), labels)
                losses.add(mean=loss, count=len(labels))
                self.strategy.step(loss, self.optimizer)
            metrics = {"epoch": epoch, "train_loss": losses.value(), **self.evaluate(validation_set, batch_size)}
            for callback in self.callbacks:
                callback.on_epoch_end(self, metrics)
            checkpoint.save()
        checkpoint.close()

    def evaluate(self, dataset: Any, batch_size: int) -> dict[str, float]:
        """Return the mean loss and the accuracy over a whole dataset, each sample counted once."""
        losses, right = self.strategy.meter(), self.strategy.meter()
        with self.strategy.evaluation(self.model), self.strategy.autocast():
            for inputs, labels in self.strategy.dataloader(dataset, global_batch_size=batch_size):
                predictions = self.model(inputs)
                losses.add(mean=self.loss(predictions, labels), count=len(labels))
                right.add(total=(predictions.argmax(1) == labels).sum(), count=len(labels))
        return {"val_loss": losses.value(), "val_accuracy": right.value()}

    def save(self, name: str) -> None:
        """Save the weights to a file in the folder, for ``model.load_state_dict(torch.load(...))``."""
        self.strategy.save(self.model, self.folder / name)


class Settings(Section):
    """The recipe's settings."""

    epochs: Annotated[int, Field(ge=1)] = 30
    """Most passes over the training set."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Images per optimizer step, over all processes."""
    lr: Annotated[float, Field(gt=0)] = 2e-3
    """Learning rate of AdamW."""
    patience: Annotated[int, Field(ge=1)] = 5
    """Epochs without a better validation accuracy, after which training ends."""
    output_dir: Path = Path("runs/custom_trainer")
    """Folder of the results and checkpoints; a run in it is resumed."""
    strategy: unitrain.StrategyConfig = unitrain.StrategyConfig()


def main() -> None:
    """Train with the trainer, as a script that has one would."""
    settings = parse_command_line(
        Settings, sys.argv[1:], prog="custom_trainer.py", description="Use UniTrain within a trainer of your own."
    )
    with unitrain.init(settings.strategy) as strategy:
        digits = images.load("digits", Path(), 8)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, len(digits.classes)))
        optimizer = torch.optim.AdamW(model.parameters(), settings.lr, fused=True)
        callbacks = [Log(), KeepBest("val_accuracy"), EarlyStopping("val_accuracy", settings.patience)]
        trainer = Trainer(strategy, model, optimizer, F.cross_entropy, settings.output_dir, callbacks)
        trainer.fit(digits.train, digits.validation, settings.epochs, settings.batch_size)
        trainer.save("model.pt")
        strategy.print(f"best accuracy {callbacks[1].state['best']:.2%}; results are in {settings.output_dir}")


if __name__ == "__main__":
    main()
