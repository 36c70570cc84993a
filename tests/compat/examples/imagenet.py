"""Horovod's ImageNet example in shape: warm-up, passes per step, metrics in each batch, resuming. On tiny images.

The second run continues from the checkpoint of the first, as Horovod's does: rank 0 loads it, and broadcasts.
"""
# mypy: ignore-errors

import argparse
import math
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="PyTorch ImageNet Example")
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005)
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--output", default="imagenet.pt")


def adjust_learning_rate(epoch, batch_idx):
    epoch += float(batch_idx + 1) / len(train_loader)
    lr_adj = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj


class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), 0

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    loss_of_epoch = Metric("train_loss")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        for i in range(0, len(data), args.batch_size):
            loss = F.cross_entropy(model(data[i : i + args.batch_size]), target[i : i + args.batch_size])
            loss_of_epoch.update(loss)
            loss.div_(math.ceil(float(len(data)) / args.batch_size))
            loss.backward()
        optimizer.step()
    return loss_of_epoch.avg


if __name__ == "__main__":
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    resume_from_epoch = 0
    for try_epoch in range(args.epochs, 0, -1):
        if os.path.exists(f"checkpoint-{try_epoch}.pt"):
            resume_from_epoch = try_epoch
            break
    resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

    generator = torch.Generator().manual_seed(0)
    train_set = TensorDataset(
        torch.randn(32, 3, 8, 8, generator=generator), torch.randint(10, (32,), generator=generator)
    )
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    allreduce_batch_size = args.batch_size * args.batches_per_allreduce
    train_loader = DataLoader(train_set, batch_size=allreduce_batch_size, sampler=train_sampler)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)
    )
    optimizer = optim.SGD(model.parameters(), lr=args.base_lr, momentum=args.momentum, weight_decay=args.wd)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    if resume_from_epoch > 0 and hvd.rank() == 0:
        checkpoint = torch.load(f"checkpoint-{resume_from_epoch}.pt")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(resume_from_epoch, args.epochs):
        train_loss = train(epoch)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: train loss {train_loss:.9f}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"checkpoint-{epoch + 1}.pt")
    if hvd.rank() == 0:
        torch.save([train_loss, *model.state_dict().values()], args.output)
