"""Train a small network on digits with Horovod, under horovodrun or mpirun."""

import horovod.torch as hvd
import torch
from digits import make_model, test_set, train_set
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

hvd.init()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", hvd.local_rank())
    torch.cuda.set_device(device)

torch.manual_seed(0)
model = make_model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=True)
test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
train = DataLoader(train_set, batch_size=128 // hvd.size(), sampler=train_sampler)
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
    totals = hvd.allreduce(totals, op=hvd.Sum)
    if hvd.rank() == 0:
        print(epoch, totals[0].item() / len(train_set), totals[1].item() / len(test_set))

if hvd.rank() == 0:
    torch.save(model.state_dict(), "model.pt")
