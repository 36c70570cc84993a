"""Train a small network on digits with Ignite's Engine on UniTrain, under any launcher."""

import torch
from digits import make_model, test_set, train_set
from ignite.engine import Engine, Events
from torch.nn.functional import cross_entropy

import unitrain

strategy = unitrain.init(seed=0)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
train = strategy.dataloader(train_set, global_batch_size=128, shuffle=True)
test = strategy.dataloader(test_set, batch_size=64)
losses, accuracy = strategy.meter(), strategy.meter()


def train_step(engine: Engine, batch: list[torch.Tensor]) -> None:
    """Train on a batch."""
    images, labels = batch
    loss = cross_entropy(model(images), labels)
    losses.add(mean=loss, count=len(labels))
    strategy.step(loss, optimizer)


trainer = Engine(train_step)


@trainer.on(Events.EPOCH_COMPLETED)
def end_epoch(engine: Engine) -> None:
    """Evaluate."""
    scheduler.step()
    with strategy.evaluation(model):
        for images, labels in test:
            accuracy.add(total=(model(images).argmax(1) == labels).sum(), count=len(labels))
    strategy.print(engine.state.epoch - 1, losses.value(), accuracy.value())
    losses.reset()
    accuracy.reset()


trainer.run(train, max_epochs=3)
strategy.save(model, "model.pt")
