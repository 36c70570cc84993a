"""Train for a number of optimizer steps in all, from where the part before ended, and note what was seen.

    python elastic.py FOLDER PART STEPS WORKERS

It is written as a user would write it, but for its notes: a line for each micro-batch of each rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import unitrain

SAMPLES, GLOBAL_BATCH, EPOCHS = 101, 12, 3


class Noisy(Dataset[tuple[int, Tensor, Tensor]]):
    """Sample i is a point, with new noise each time."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        x = torch.linspace(-1, 1, SAMPLES, dtype=torch.float64)[index]
        inputs = torch.stack([x, x**2, x**3]) + 0.1 * torch.randn(3, dtype=torch.float64)
        return index, inputs, torch.sin(3 * x).reshape(1)


def main(folder: Path, part: str, last_step: int, workers: int) -> None:
    strategy = unitrain.init(precision="fp64", accumulate=2, seed=7)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer = strategy.prepare(model, optimizer)
    loader = strategy.dataloader(Noisy(), global_batch_size=GLOBAL_BATCH, shuffle=True, num_workers=workers)
    step = 0
    if (folder / "state.pt").exists():
        state = strategy.load(folder / "state.pt")
        strategy.unwrap(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        step = state["step"]

    with (folder / f"{part}.{strategy.rank}.notes").open("w") as notes:
        for epoch in loader.epochs(EPOCHS):
            for ids, inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                note = {"epoch": epoch, "step": step, "ids": ids.tolist(), "loss": loss.item() * len(ids)}
                if len(ids):
                    notes.write(json.dumps(note) + "\n")
                step += strategy.step(loss, optimizer).stepped
                if step == last_step:
                    break
            if step == last_step:
                break
    strategy.save({"model": model, "optimizer": optimizer, "loader": loader, "step": step}, folder / "state.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
