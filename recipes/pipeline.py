r"""A pipeline: each process has some layers of one MLP and trains them, by torch.distributed.pipelining, on digits.

    torchrun --nproc-per-node 2 recipes/pipeline.py
    mpirun -np 2 python recipes/pipeline.py --schedule gpipe --strategy.backend ddp

UniTrain starts communication, reads the data, measures, and ends all processes when one fails. It does not prepare the
model, which would make all stages equal: the schedule and the optimizer's step are torch's own.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as states
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import unitrain
from unitrain import ConfigError, NonFiniteError, Section, Strategy, parse_command_line
from unitrain.recipes.image_classification import images

# The optimizer's options by parameter, and not by group: the groups of all stages have the same numbers.
BY_NAME = states.StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    """An MLP; or the layers of it that a stage has, under the names that they have in the whole."""

    def __init__(self, features: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        blocks = {str(i): nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()) for i in range(depth)}
        layers = {"embed": nn.Linear(features, width), **blocks, "head": nn.Linear(width, classes)}
        self.layers: nn.ModuleDict = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last layer makes of x."""
        for layer in self.layers.values():
            x = layer(x)
        return x

    def keep(self, stage: int, stages: int) -> None:
        """Drop all layers but those of a stage."""
        names = list(self.layers)
        first, end = (len(names) * i // stages for i in (stage, stage + 1))
        for name in names[:first] + names[end:]:
            del self.layers[name]


class Pipeline:
    """Trains the stage of this process. Every method is collective."""

    def __init__(self, strategy: Strategy, settings: Settings, model: nn.Module, train: unitrain.Loader) -> None:
        self._strategy, self._settings, self._model, self._train = strategy, settings, model, train
        self._is_last = strategy.rank == strategy.world_size - 1
        stage = partial(PipelineStage, model, strategy.rank, strategy.world_size, strategy.device)
        # A schedule has fixed shapes: training batches in micro-batches, and the validation set in one.
        make = Schedule1F1B if settings.schedule == "1f1b" else ScheduleGPipe
        self._training: Any = make(stage(), settings.micro_batches, loss_fn=F.cross_entropy)
        self._validation: Any = ScheduleGPipe(stage(), 1)
        self._optimizer = torch.optim.AdamW(model.parameters(), settings.lr)

    def whole(self, own: Any) -> tuple[list[Tensor], Tensor]:
        """Return the global batch, of which each rank has read a part: the first stage's arguments, and the labels."""
        inputs, labels = self._strategy.gather(tuple(own))
        inputs = inputs.flatten(1).to(next(self._model.parameters()).dtype)
        return [inputs] if self._strategy.is_main else [], labels

    def step(self, own: Any, losses: unitrain.Meter) -> None:
        """Make an optimizer step on the mean loss of the global batch."""
        inputs, labels = self.whole(own)
        found: list[Tensor] = []
        with self._strategy.autocast():
            self._training.step(*inputs, target=labels if self._is_last else None, losses=found)
        if self._is_last:
            losses.add(mean=torch.stack(found).mean(), count=len(labels))
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm = self._strategy.all_reduce(get_total_norm(gradients).square()).sqrt()  # of all stages, on all ranks
        if not norm.isfinite():
            raise NonFiniteError("a gradient is not finite. The weights are those of the previous step.")
        if self._settings.strategy.clip_norm is not None:
            clip_grads_with_norm_(self._model.parameters(), self._settings.strategy.clip_norm, norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def accuracy(self, dataset: Any) -> float:
        """Return the accuracy over a dataset, which is one batch."""
        right = self._strategy.meter()
        for own in self._strategy.dataloader(dataset, global_batch_size=len(dataset)):
            inputs, labels = self.whole(own)
            logits = self._validation.eval(*inputs)
            if self._is_last:
                right.add(total=(logits.argmax(1) == labels).sum(), count=len(labels))
        return right.value()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has of this rank. Names of parameters are those in the whole model."""
        optimizer = states.get_optimizer_state_dict(self._model, self._optimizer, options=BY_NAME)
        return {"model": self._model.state_dict(), "optimizer": optimizer, "loader": self._train.state_dict()}

    def resume(self, folder: Path) -> None:
        """Continue from the newest checkpoint, if there is one, with any number of stages."""
        complete = "epoch-*/.metadata"  # which is written last
        newest = self._strategy.on_main(lambda: max((path.parent.name for path in folder.glob(complete)), default=""))
        if newest:
            state = self.state()
            dcp.load(state, checkpoint_id=folder / newest)
            found = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            states.set_state_dict(self._model, self._optimizer, **found, options=BY_NAME)
            self._train.load_state_dict(state["loader"])


class Settings(Section):
    """The recipe's settings."""

    epochs: Annotated[int, Field(ge=1)] = 20
    """Passes over the training set."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Images per optimizer step."""
    micro_batches: Annotated[int, Field(ge=1)] = 4
    """Micro-batches per step, on which the stages work at the same time; a divisor of batch-size."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of forwards and backwards; 1f1b keeps fewer activations."""
    depth: Annotated[int, Field(ge=0)] = 6
    """Number of layers between the first and the last."""
    lr: Annotated[float, Field(gt=0)] = 2e-3
    """Learning rate of AdamW."""
    output_dir: Path = Path("runs/pipeline")
    """Folder of the results and checkpoints; a run in it is resumed."""
    strategy: unitrain.StrategyConfig = unitrain.StrategyConfig()


def main() -> None:
    """Train a pipeline with a stage for each process."""
    settings = parse_command_line(Settings, sys.argv[1:], prog="pipeline.py", description="Train an MLP in stages.")
    with unitrain.init(settings.strategy) as strategy:
        if not dist.is_initialized() or not 1 < strategy.world_size <= settings.depth + 2:
            raise ConfigError("a pipeline needs backend ddp, and 2 to depth + 2 processes: torchrun --nproc-per-node 2")
        if settings.batch_size % settings.micro_batches:
            raise ConfigError("batch_size must be a multiple of micro_batches.")
        if settings.strategy.accumulate > 1 or settings.strategy.precision == "fp16":
            raise ConfigError("use micro_batches instead of accumulate, and precision bf16 instead of fp16.")
        digits = images.load("digits", Path(), 8)
        model = Net(3 * 8 * 8, 64, settings.depth, len(digits.classes))  # the same on all ranks
        model.keep(strategy.rank, strategy.world_size)
        model.to(strategy.device, torch.float64 if settings.strategy.precision == "fp64" else torch.float32)
        train = strategy.dataloader(digits.train, global_batch_size=settings.batch_size, shuffle=True, drop_last=True)
        pipeline, checkpoints = Pipeline(strategy, settings, model, train), settings.output_dir / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        pipeline.resume(checkpoints)
        for epoch in train.epochs(settings.epochs):
            losses = strategy.meter()
            for own in train:
                pipeline.step(own, losses)
            metrics = {"train_loss": losses.value(), "val_accuracy": pipeline.accuracy(digits.validation)}
            strategy.print(f"epoch {epoch}", *(f"{name} {value:.5g}" for name, value in metrics.items()), sep=", ")
            if strategy.is_main:
                with (settings.output_dir / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"epoch": epoch, **metrics}) + "\n")
            dcp.save(pipeline.state(), checkpoint_id=checkpoints / f"epoch-{train.epoch:04d}")
        stages = strategy.communicator.all_gather_object(model.state_dict())
        strategy.save(
            {key: value for stage in stages for key, value in stage.items()}, settings.output_dir / "model.pt"
        )


if __name__ == "__main__":
    main()
