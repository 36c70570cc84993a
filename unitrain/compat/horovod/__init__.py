"""``horovod.torch`` on UniTrain's backends: ``import unitrain.compat.horovod as hvd``.

Without a change of the script: ``unitrain horovod SCRIPT``.
"""
# ruff: noqa: F403

from unitrain.compat.horovod import elastic as elastic
from unitrain.compat.horovod import modules
from unitrain.compat.horovod.collectives import *
from unitrain.compat.horovod.optimizer import *
from unitrain.compat.horovod.process_sets import *
from unitrain.compat.horovod.sync_batch_norm import *
from unitrain.compat.horovod.world import *

if __name__ == "horovod":  # as scripts import it where `unitrain horovod` has put the folder on the path
    modules.install()
