"""Train a small network on digits with UniTrain, under any launcher."""

import torch
from digits import make_model, test_set, train_set
from torch.nn.functional import cross_entropy

import unitrain

strategy = unitrain.init(seed=0)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
train = strategy.dataloader(train_set, global_batch_size=128, shuffle=True)
test = strategy.dataloader(test_set, batch_size=64)

for epoch in range(3):
    losses = strategy.meter()
    for images, labels in train:
        loss = cross_entropy(model(images), labels)
        losses.add(mean=loss, count=len(labels))
        strategy.step(loss, optimizer)
    scheduler.step()

    accuracy = strategy.meter()
    with strategy.evaluation(model):
        for images, labels in test:
            accuracy.add(total=(model(images).argmax(1) == labels).sum(), count=len(labels))
    strategy.print(epoch, losses.value(), accuracy.value())

strategy.save(model, "model.pt")
