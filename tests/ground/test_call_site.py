"""Warnings of the library show the line of the script that led to them, however deep they were found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn
from torch.optim import SGD

import unitrain


def test_a_warning_of_a_loader_names_the_script(tmp_path: Path) -> None:
    """Of ``checkpoint.resume``, say, which calls the loader."""

    def run(batch: int) -> None:
        with unitrain.init(backend="single", device="cpu") as strategy:
            model = nn.Linear(1, 1)
            model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
            train = strategy.dataloader([float(i) for i in range(8)], global_batch_size=batch)
            checkpoint = strategy.checkpoint(tmp_path, model=model, optimizer=optimizer, loader=train)
            checkpoint.resume()
            for batch_of in train.epochs(1):
                del batch_of
            checkpoint.save()

    run(2)
    with pytest.warns(UserWarning, match="batch") as warned:
        run(4)
    assert {warning.filename for warning in warned} == {__file__}


def test_it_is_shown_once_for_a_line() -> None:
    code = "from unitrain import call_site\nfor _ in range(3): call_site.warn('look here')\n"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stderr.count("UserWarning: look here") == 1
    assert "<string>:2" in ran.stderr
