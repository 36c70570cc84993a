"""Train a small network on digits with torch's DistributedDataParallel, under torchrun."""

import os

import torch
import torch.distributed as dist
from digits import make_model, test_set, train_set
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = DistributedDataParallel(make_model().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
train_sampler = DistributedSampler(train_set, shuffle=True)
test_sampler = DistributedSampler(test_set, shuffle=False)
train = DataLoader(train_set, batch_size=128 // world_size, sampler=train_sampler)
test = DataLoader(test_set, batch_size=64, sampler=test_sampler)

for epoch in range(3):
    train_sampler.set_epoch(epoch)
    totals = torch.zeros(2, device=device)
    for images, labels in train:
        images, labels = images.to(device), labels.to(device)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals[0] += loss.detach() * len(labels)
    scheduler.step()

    model.eval()
    with torch.no_grad():
        for images, labels in test:
            images, labels = images.to(device), labels.to(device)
            totals[1] += (model(images).argmax(1) == labels).sum()
    model.train()
    dist.all_reduce(totals)
    if rank == 0:
        print(epoch, totals[0].item() / len(train_set), totals[1].item() / len(test_set))

if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
