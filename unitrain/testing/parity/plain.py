"""The reference: a loop of plain PyTorch on one device, without UniTrain."""

from __future__ import annotations

import torch

from unitrain.device import HALF_DTYPES
from unitrain.module_copy import move_foreign
from unitrain.testing.parity.cases import Case, Digits, Trace, build, mean_loss, overflow

_CPU = torch.device("cpu")


def train(case: Case, device: torch.device = _CPU) -> Trace:
    """Train a case with every global batch as one batch, and return its record.

    In half precision, it trains on ``device``, where autocast may convert other operations than on the CPU.

    Args:
        case: the case.
        device: the device of the world to compare with.
    """
    # The tensors are small: on busy cores, several threads took 40 times as long, waiting for one another.
    torch.set_num_threads(1)
    trace = Trace()
    model, optimizer, scheduler = build(case)
    half, double = case.precision in HALF_DTYPES, case.precision == "fp64"
    at = device if half else _CPU
    move_foreign([*model.parameters(), *model.buffers()], at)
    model.to(at, torch.float64 if double else None)
    trace.watch(optimizer)
    data = Digits(case.samples)
    scaler = torch.amp.GradScaler(at.type, enabled=case.precision == "fp16")
    starts = range(0, case.samples, case.global_batch)
    for step in range(case.steps):
        begin = starts[step % len(starts)]
        rows = torch.arange(begin, min(begin + case.global_batch, case.samples))
        images, labels, tokens = (values[rows].to(at) for values in (data.images, data.labels, data.tokens))
        optimizer.zero_grad()
        with torch.autocast(at.type, HALF_DTYPES.get(case.precision), enabled=half):
            logits = model(images.double() if double else images)
            loss = mean_loss(case, logits, labels, tokens)
        trace.samples.append(rows.tolist())
        trace.losses.append((loss.item(), float(tokens.sum() if case.weighted else len(rows))))
        scaler.scale(overflow(case, step, rows, loss)).backward()  # type: ignore[no-untyped-call]
        # As the strategy: clipping and the recorded gradients are of the unscaled ones.
        scaler.unscale_(optimizer)
        if "clip_norm" in case.settings:
            trace.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.settings["clip_norm"])))
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # else the step was left out
            scheduler.step()
    trace.finish(model)
    return trace
