"""PowerSGD: gradients sent as products of thin matrices, through a communication hook of torch's DDP.

A gradient of n rows and m columns, seen as a matrix, is replaced by one of a low rank r: (n + m) r numbers travel
instead of n m. What is lost at a step is added to the gradient of the next (T. Vogels, S. P. Karimireddy, M. Jaggi,
PowerSGD, NeurIPS 2019). Vectors, and matrices that would not become at least half as large, travel as they are.
"""

# No annotations from __future__: DDP looks at a hook's, and wants types.

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

# Added to norms before they divide, because a column may be zero: a model without a gradient, a frozen branch.
_TINY = 1e-20


def add_power_sgd(wrapped: DistributedDataParallel, *, rank: int, start_step: int, in_turn: bool) -> None:
    """Let a wrapper's gradients travel compressed.

    Args:
        wrapped: the wrapper, which has no hook yet.
        rank: of the matrices that travel, 1 or more.
        start_step: how many reductions are exact first, 2 or more: DDP lays its buckets out anew after the first.
        in_turn: whether a bucket waits for the one before. A bucket's second and third collective start when the one
            before them is done. Under NCCL that order is the stream's. Under gloo it is that of its threads, which
            differs between ranks: two buckets at once met one another's collectives and aborted the process.
    """
    state = PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=start_step, orthogonalization_epsilon=_TINY
    )
    wrapped.register_comm_hook(state, _in_turn if in_turn else powerSGD_hook)


def _in_turn(state: PowerSGDState, bucket: dist.GradBucket) -> Future[Tensor]:
    compresses = state.iter >= state.start_powerSGD_iter
    reduced: Future[Tensor] = powerSGD_hook(state, bucket)
    if compresses:
        reduced.wait()
    return reduced
