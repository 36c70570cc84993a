"""``horovod.torch`` on UniTrain's backends: ``import unitrain.compat.horovod as hvd``.

Without a change of the script: ``unitrain horovod SCRIPT``.
"""

# fmt: off
from unitrain.compat.horovod import elastic, modules  # noqa: I001  (one name in a line would be 70)
from unitrain.compat.horovod.collectives import (
    Adasum, Average, Max, Min, Product, Sum, allgather, allgather_async, allreduce, allreduce_, allreduce_async,
    allreduce_async_, alltoall, alltoall_async, barrier, broadcast, broadcast_, broadcast_async, broadcast_async_,
    grouped_allgather, grouped_allgather_async, grouped_allreduce, grouped_allreduce_, grouped_allreduce_async,
    grouped_allreduce_async_, grouped_reducescatter, grouped_reducescatter_async, join, poll, reducescatter,
    reducescatter_async, sparse_allreduce_async, synchronize,
)
from unitrain.compat.horovod.compression import Compression
from unitrain.compat.horovod.functions import (
    allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters,
)
from unitrain.compat.horovod.matching import HorovodInternalError
from unitrain.compat.horovod.optimizer import DistributedOptimizer
from unitrain.compat.horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from unitrain.compat.horovod.sync_batch_norm import SyncBatchNorm
from unitrain.compat.horovod.world import (
    ccl_built, cross_rank, cross_size, cuda_built, ddl_built, gloo_built, gloo_enabled, init, is_homogeneous,
    is_initialized, local_rank, local_size, mpi_built, mpi_enabled, mpi_threads_supported, nccl_built, rank,
    rocm_built, shutdown, size, start_timeline, stop_timeline, strategy,
)

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "ProcessSet",
    "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async", "allgather_object",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "cross_rank", "cross_size", "cuda_built",
    "ddl_built", "elastic", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous",
    "is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built",
    "shutdown", "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "strategy", "synchronize",
]
# fmt: on

if __name__ == "horovod":  # as scripts import it where `unitrain horovod` has put the folder on the path
    modules.install()
