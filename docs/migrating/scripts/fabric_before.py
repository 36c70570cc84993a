"""Train a small network on digits with Lightning Fabric, under fabric run."""

import torch
from digits import make_model, test_set, train_set
from lightning_fabric import Fabric
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

fabric = Fabric()
fabric.launch()
fabric.seed_everything(0)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
train = DataLoader(train_set, batch_size=128 // fabric.world_size, shuffle=True)
test = DataLoader(test_set, batch_size=64)
model, optimizer = fabric.setup(model, optimizer)
train, test = fabric.setup_dataloaders(train, test)

for epoch in range(3):
    totals = torch.zeros(2, device=fabric.device)
    for images, labels in train:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        totals[0] += loss.detach() * len(labels)
    scheduler.step()

    model.eval()
    with torch.no_grad():
        for images, labels in test:
            totals[1] += (model(images).argmax(1) == labels).sum()
    model.train()
    totals = fabric.all_reduce(totals, reduce_op="sum")
    fabric.print(epoch, totals[0].item() / len(train_set), totals[1].item() / len(test_set))

fabric.save("model.pt", {"model": model})
