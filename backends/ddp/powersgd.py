"""PowerSGD gradient compression by low-rank matrices, through a communication hook of torch's DDP.

A gradient, viewed as a matrix of n rows and m columns, is approximated by one of a low rank r, so that (n + m) r
elements are sent instead of n m. The error of a step is added to the gradient of the next (T. Vogels, S. P.
Karimireddy, M. Jaggi, PowerSGD, NeurIPS 2019). Vectors and matrices that would not shrink to half stay uncompressed.
"""

# No `from __future__ import annotations`: DDP checks a hook's annotations, which must be types and not strings.

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

# Added to norms before dividing by them, since a column may be zero: in a frozen branch, say.
_TINY = 1e-20


def add_power_sgd(wrapped: DistributedDataParallel, *, rank: int, start_step: int, sequential: bool) -> None:
    """Register PowerSGD on a DDP module.

    Args:
        wrapped: the DDP module, without a communication hook.
        rank: rank of the matrices that are sent, at least 1.
        start_step: number of exact reductions first, at least 2: DDP rebuilds its buckets after the first.
        sequential: whether a bucket waits for the previous one. Each bucket runs three collectives, one after the
            other. NCCL orders them by its stream. gloo's threads order them differently on each rank: the collectives
            of two buckets were mixed up, which aborted the process.
    """
    state = PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=start_step, orthogonalization_epsilon=_TINY
    )
    wrapped.register_comm_hook(state, _sequential_hook if sequential else powerSGD_hook)


def _sequential_hook(state: PowerSGDState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Compress a bucket as torch's hook does, and block until it is reduced. Runs in autograd's thread."""
    compresses = state.iter >= state.start_powerSGD_iter
    reduced: Future[Tensor] = powerSGD_hook(state, bucket)
    if compresses:
        reduced.wait()
    return reduced
