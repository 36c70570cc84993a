"""``horovod.torch`` on UniTrain's backends: ``import unitrain.compat.horovod as hvd``.

Without a change of the script: ``unitrain horovod SCRIPT``.
"""

from unitrain.compat.horovod import collectives, elastic, modules, world
from unitrain.compat.horovod.collectives import *  # noqa: F403
from unitrain.compat.horovod.compression import Compression
from unitrain.compat.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from unitrain.compat.horovod.matching import HorovodInternalError
from unitrain.compat.horovod.optimizer import DistributedOptimizer
from unitrain.compat.horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from unitrain.compat.horovod.sync_batch_norm import SyncBatchNorm
from unitrain.compat.horovod.world import *  # noqa: F403

__all__ = [
    "Compression", "DistributedOptimizer", "HorovodInternalError", "ProcessSet", "SyncBatchNorm", "add_process_set",
    "allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "elastic",
    "global_process_set", "remove_process_set",
]  # fmt: skip
__all__ += collectives.__all__
__all__ += world.__all__

if __name__ == "horovod":  # as scripts import it where `unitrain horovod` has put the folder on the path
    modules.install()
