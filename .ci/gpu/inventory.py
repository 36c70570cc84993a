"""Prints the machine: card, driver, tools, versions, and the speeds of a copy and of a matrix product."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch


def said(*command: str, line: int = -1) -> str:
    """Return a line that a command prints, by default the last."""
    if shutil.which(command[0]) is None:
        return "not there"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).strip().splitlines()[line]


def fastest(work: Callable[[], object], times: int = 5) -> float:
    """Return the seconds of the fastest of several calls, after one for warm-up."""
    seconds = []
    for _ in range(1 + times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def main() -> None:
    """Print all of it."""
    fields = "name,driver_version,memory.total,memory.used,compute_mode,mig.mode.current,clocks.sm"
    print("card:", said("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"))
    print(
        "cores:", len(os.sched_getaffinity(0)), " memory:", said("free", "-g"), " shared:", said("df", "-h", "/dev/shm")
    )
    print("host:", socket.gethostname(), said("getent", "hosts", socket.gethostname()))
    compilers = said("c++", "--version", line=0), said("nvcc", "--version"), said("cmake", "--version", line=0)
    print("compilers:", *compilers, sep=" | ")
    print("Python.h:", Path(sysconfig.get_path("include"), "Python.h").is_file())
    print("torch:", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    if not torch.cuda.is_available():
        print("torch sees no CUDA GPU; its accelerator is", torch.accelerator.current_accelerator())
        return
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    print("NCCL:", nccl, " devices:", torch.cuda.device_count())
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    copy = torch.empty_like(source)
    print(f"copy: {2 * source.nbytes / fastest(lambda: copy.copy_(source)) / 1e12:.2f} TB/s, read and written")
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    print(f"bf16 product: {2 * 8192**3 / fastest(lambda: matrix @ matrix) / 1e12:.0f} TFLOP/s")
    host = torch.empty(1 << 28, pin_memory=True)
    on_gpu = torch.empty_like(host, device="cuda")
    print(f"pinned copy to the GPU: {host.nbytes / fastest(lambda: on_gpu.copy_(host)) / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
