"""The reference: a loop of plain PyTorch on one device, without UniTrain."""

from __future__ import annotations

import torch

from unitrain.commands.verify.cases import Case, Digits, build, mean_loss, overflow
from unitrain.commands.verify.trace import Trace

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train(case: Case) -> Trace:
    """Train a case on the CPU, with every global batch as one batch, and return its record."""
    # The tensors are small: on busy cores, several threads took 40 times as long, waiting for one another.
    torch.set_num_threads(1)
    trace = Trace()
    model, optimizer, scheduler = build(case)
    double = case.precision == "fp64"
    if double:
        model.double()
    trace.watch(optimizer)
    data = Digits(case.samples)
    scaler = torch.amp.GradScaler("cpu", enabled=case.precision == "fp16")
    starts = range(0, case.samples, case.global_batch)
    for step in range(case.steps):
        begin = starts[step % len(starts)]
        rows = torch.arange(begin, min(begin + case.global_batch, case.samples))
        images, labels, tokens = data.images[rows], data.labels[rows], data.tokens[rows]
        optimizer.zero_grad()
        with torch.autocast("cpu", _AUTOCAST.get(case.precision), enabled=case.precision in _AUTOCAST):
            logits = model(images.double() if double else images)
            loss = mean_loss(case, logits, labels, tokens)
        trace.samples.append(rows.tolist())
        trace.losses.append((loss.item(), float(tokens.sum() if case.weighted else len(rows))))
        scaler.scale(overflow(case, step, rows, loss)).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        if "clip_value" in case.settings:
            torch.nn.utils.clip_grad_value_(model.parameters(), case.settings["clip_value"])
        if "clip_norm" in case.settings:
            trace.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.settings["clip_norm"])))
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # else the step was left out
            scheduler.step()
    trace.finish(model)
    return trace
