"""``simccl``: a process group for the simulated device that behaves to streams and the host as NCCL does.

A collective is queued in a stream of the group, behind the current one, and waiting for it makes the current stream
wait. gloo carries the data, in a thread of the group's. If a rank does not take part, or is gone, the collective stays
on the device until the group is aborted, or its timeout ends the process.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import simulated_module as sim
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, _create_work_from_future

_native: Any = import_module("simulated_device_module")
# After this time, a collective that this rank's host does not wait for is begun nevertheless: others may wait for it.
_GRACE_S = 0.02
_groups: weakref.WeakSet[SimulatedGroup] = weakref.WeakSet()

Communicate = Callable[[list[Tensor], list[Tensor]], object]
"""Sends tensors of the host, and receives into others."""


class SimulatedGroup(Backend):
    """What torch.distributed calls a backend of a process group; see the module."""

    supports_splitting = supports_coalescing = supports_shrinking = supports_reconfigure = supports_window = False

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._timeout: timedelta = options.timeout
        store = dist.PrefixStore("simccl", options.store)
        # Longer than the own timeout, which is the one that counts.
        self._gloo: Any = dist.ProcessGroupGloo(store, self.rank(), self.size(), self._timeout + timedelta(minutes=5))
        self._streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._ended = threading.Event()  # gloo's part of the current collective has
        self._thread = threading.Thread(target=self._communicate, name="simccl", daemon=True)
        self._thread.start()
        _groups.add(self)

    # ------------------------------------------------------------------------------------------------- its life

    def getBackendName(self) -> str:  # noqa: N802
        return "simccl"

    def abort(self) -> None:
        """End the collectives that are on the device; what they should have written stays as it was."""
        self._aborted.set()
        self._ended.set()
        self._gloo.abort()
        self._work.put(None)  # its thread is not waited for: before a collective, there may be one of another group

    def shutdown(self) -> None:
        """End the thread, after the collectives that have been queued."""
        self._work.put(None)
        self._thread.join()

    def _communicate(self) -> None:
        # It may do the streams' work. OpenMP counts threads for each, and another number would round in another way.
        torch.set_num_threads(torch.get_num_threads())
        while (work := self._work.get()) is not None:
            work()

    # ------------------------------------------------------------------------------------------------ collectives

    def _queue(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], communicate: Communicate) -> Any:
        """Queue a collective, and return its work."""
        if self._aborted.is_set():
            raise dist.DistBackendError(f"simccl: {name} in a group that was aborted")
        device = (*inputs, *outputs)[0].device
        if device not in self._streams:
            self._streams[device] = sim.Stream(device), sim.Stream(device)
        sending, receiving = self._streams[device]
        for stream in (sending, receiving):
            stream.wait_stream(sim.current_stream(device))
        with torch.no_grad(), sim.stream(sending):
            sent = [_pinned(tensor).copy_(tensor.detach(), non_blocking=True) for tensor in inputs]
        arrived = _native.end_of(device.index, sending.stream_id)
        received = [_pinned(tensor) for tensor in outputs]
        gate = _native.Gate()
        self._work.put(lambda: self._carry_out(name, gate, arrived, lambda: communicate(sent, received)))
        _native.stream_waits(device.index, receiving.stream_id, gate)
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[device])
        with torch.no_grad(), sim.stream(receiving):
            for output, value in zip(outputs, received, strict=True):
                output.detach().copy_(value, non_blocking=True)
            for tensor in (*inputs, *outputs):
                for stream in (sending, receiving):
                    tensor.detach().record_stream(stream)
            future.set_result(list(outputs))
        return _create_work_from_future(future)

    def _carry_out(self, name: str, gate: Any, arrived: Any, communicate: Callable[[], object]) -> None:
        """Communicate when the device has come to it, or soon; then let the device go on."""
        gate.wait_until_wanted(_GRACE_S)
        _native.work_to(arrived)
        try:
            if not self._aborted.is_set():
                communicate()
        except Exception as error:
            # Who talks to a rank that is gone notices nothing but that no answer comes.
            print(f"simccl: {name} of rank {self.rank()}: {str(error).splitlines()[0]}", file=sys.stderr)
            self._wait(self._aborted)
        gate.open()

    def _finish(self, work: Any) -> None:
        """Wait for work of gloo's, the group's abort or its timeout."""
        self._ended = ended = threading.Event()
        work.get_future().add_done_callback(lambda future: ended.set())
        if not self._aborted.is_set():
            self._wait(ended)
        if self._aborted.is_set():
            raise RuntimeError("aborted")
        work.wait()

    def _wait(self, event: threading.Event) -> None:
        """Wait for an event, or end the process after the group's timeout."""
        if not event.wait(self._timeout.total_seconds()):
            print(f"simccl: rank {self.rank()}'s watchdog: a collective timed out; ending the process", file=sys.stderr)
            os.abort()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._queue("all_reduce", tensors, tensors, self._all_reduce(opts))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._queue("all_reduce", tensors, tensors, self._all_reduce(opts))

    def _all_reduce(self, opts: Any) -> Communicate:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def communicate(sent: list[Tensor], received: list[Tensor]) -> None:
            for value, result in zip(sent, received, strict=True):
                result.copy_(self._reduced(value, op))

        return communicate

    def _reduced(self, value: Tensor, op: Any) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
        self._finish(self._gloo.allreduce([value], options))
        return value / self.size() if op == dist.ReduceOp.AVG else value

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        root = opts.rootRank

        def communicate(sent: list[Tensor], received: list[Tensor]) -> None:
            for value, result in zip(sent, received, strict=True):
                options = dist.BroadcastOptions()
                options.rootRank = root
                self._finish(self._gloo.broadcast([value], options))
                result.copy_(value)

        return self._queue("broadcast", tensors, tensors, communicate)

    def _gathered(self, value: Tensor) -> list[Tensor]:
        all_values = [torch.empty_like(value) for _ in range(self.size())]
        self._finish(self._gloo.allgather([all_values], [value]))
        return all_values

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        def communicate(sent: list[Tensor], received: list[Tensor]) -> None:
            for value, result in zip(self._gathered(sent[0]), received, strict=True):
                result.copy_(value)

        return self._queue("all_gather", inputs, outputs[0], communicate)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        def communicate(sent: list[Tensor], received: list[Tensor]) -> None:
            for value, result in zip(sent, received, strict=True):
                result.view(-1).copy_(torch.cat([part.view(-1) for part in self._gathered(value)]))

        return self._queue("all_gather", inputs, outputs, communicate)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def communicate(sent: list[Tensor], received: list[Tensor]) -> None:
            for value, result in zip(sent, received, strict=True):
                result.view(-1).copy_(self._reduced(value, op).view(-1).chunk(self.size())[self.rank()])

        return self._queue("reduce_scatter", inputs, outputs, communicate)

    def barrier(self, opts: Any = None) -> Any:
        """Have the host wait for all ranks, as NCCL's does."""
        device = torch.device("sim", sim.current_device())
        work = self.allreduce([torch.zeros(1, device=device)])
        work.wait()
        sim.current_stream(device).synchronize()
        return work


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def register() -> None:
    """Make it the communication library of the device."""
    dist.Backend.register_backend(
        "simccl", lambda options, _: SimulatedGroup(options), extended_api=True, devices=["sim"]
    )
    atexit.register(_abort_all)


def _abort_all() -> None:
    groups = list(_groups)
    for group in groups:
        group.abort()
    for group in groups:
        group.shutdown()
