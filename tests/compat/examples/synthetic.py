"""Horovod's synthetic benchmark in shape: SyncBatchNorm in the model, one batch, and no samplers. On tiny images.

Horovod's own SyncBatchNorm refuses a CPU, so the flag asks for it.
"""
# mypy: ignore-errors

import argparse
import timeit

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser(description="PyTorch Synthetic Benchmark")
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--sync-batchnorm", action="store_true")
parser.add_argument("--num-iters", type=int, default=2)
parser.add_argument("--output", default="synthetic.pt")
args = parser.parse_args()

hvd.init()
torch.manual_seed(hvd.rank())
torch.set_num_threads(1)
norm_layer = hvd.SyncBatchNorm if args.sync_batchnorm else nn.BatchNorm2d
model = nn.Sequential(
    nn.Conv2d(3, 4, 3), norm_layer(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)
)
optimizer = optim.SGD(model.parameters(), lr=0.01 * hvd.size())
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data, target = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()


for iteration in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=2)
    if hvd.rank() == 0:
        print(f"Iter #{iteration}: {2 * len(data) / seconds:.1f} img/sec per CPU")
if hvd.rank() == 0:
    torch.save(list(model.state_dict().values()), args.output)
