"""Horovod's elastic MNIST example in shape: a state that is committed, a sampler, and a callback for resets."""
# mypy: ignore-errors

import argparse
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="PyTorch elastic example")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--lose-a-rank", action="store_true", help="once, in the second epoch")
parser.add_argument("--output", default="elastic_mnist.pt")
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
train_set = TensorDataset(torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator))
train_sampler = hvd.elastic.ElasticSampler(train_set)
train_loader = DataLoader(train_set, batch_size=4, sampler=train_sampler)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, args.epochs):  # noqa: B020
        state.model.train()
        for state.batch, (data, target) in enumerate(train_loader):
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            train_sampler.record_batch(state.batch, len(data))
            state.commit()
            if (
                args.lose_a_rank
                and hvd.rank() == 1
                and (state.epoch, state.batch) == (1, 2)
                and not os.path.exists("lost")
            ):
                open("lost", "w").close()
                os._exit(1)
        train_sampler.set_epoch(state.epoch + 1)
        state.batch = 0


def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, train_sampler=train_sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
if hvd.rank() == 0:
    torch.save(list(model.state_dict().values()), args.output)
