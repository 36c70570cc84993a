"""``horovod.torch`` on UniTrain's backends: ``import unitrain.compat.horovod as hvd``.

Without a change of the script: ``unitrain horovod SCRIPT``.
"""

from unitrain.compat.horovod import elastic, modules
from unitrain.compat.horovod.collectives import (
    Adasum, Average, Max, Min, Product, Sum, allgather, allgather_async, allreduce, allreduce_, allreduce_async,
    allreduce_async_, alltoall, alltoall_async, broadcast, broadcast_, broadcast_async, broadcast_async_,
    grouped_allgather, grouped_allgather_async, grouped_allreduce, grouped_allreduce_, grouped_allreduce_async,
    grouped_allreduce_async_, grouped_reducescatter, grouped_reducescatter_async, reducescatter, reducescatter_async,
    sparse_allreduce_async,
)  # fmt: skip
from unitrain.compat.horovod.compression import Compression
from unitrain.compat.horovod.functions import (
    allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters,
)  # fmt: skip
from unitrain.compat.horovod.optimizer import DistributedOptimizer
from unitrain.compat.horovod.process_sets import (
    HorovodInternalError, ProcessSet, add_process_set, barrier, global_process_set, join, poll, remove_process_set,
    synchronize,
)  # fmt: skip
from unitrain.compat.horovod.sync_batch_norm import SyncBatchNorm
from unitrain.compat.horovod.world import (
    ccl_built, cross_rank, cross_size, cuda_built, ddl_built, gloo_built, gloo_enabled, init, is_homogeneous,
    is_initialized, local_rank, local_size, mpi_built, mpi_enabled, mpi_threads_supported, nccl_built, rank,
    rocm_built, shutdown, size, start_timeline, stop_timeline, strategy,
)  # fmt: skip

if __name__ == "horovod":  # as scripts import it where `unitrain horovod` has put the folder on the path
    modules.install()
