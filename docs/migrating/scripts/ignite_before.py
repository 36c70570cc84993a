"""Train a small network on digits with PyTorch Ignite, under torchrun."""

import ignite.distributed as idist
import torch
from digits import make_model, test_set, train_set
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.metrics import Accuracy, Average
from torch.nn.functional import cross_entropy


def train_network(local_rank: int) -> None:
    """Train on one rank."""
    torch.manual_seed(0)
    device = idist.device()
    model = idist.auto_model(make_model())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    train = idist.auto_dataloader(train_set, batch_size=128, shuffle=True)
    test = idist.auto_dataloader(test_set, batch_size=64, shuffle=False)

    def train_step(engine: Engine, batch: list[torch.Tensor]) -> float:
        images, labels = batch[0].to(device), batch[1].to(device)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(train_step)
    Average().attach(trainer, "loss")
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()}, device)

    @trainer.on(Events.EPOCH_COMPLETED)
    def end_epoch(engine: Engine) -> None:
        scheduler.step()
        accuracy = evaluator.run(test).metrics["accuracy"]
        if idist.get_rank() == 0:
            print(engine.state.epoch - 1, engine.state.metrics["loss"], accuracy)

    trainer.run(train, max_epochs=3)
    if idist.get_rank() == 0:
        torch.save(getattr(model, "module", model).state_dict(), "model.pt")


with idist.Parallel(backend="nccl" if torch.cuda.is_available() else "gloo") as parallel:
    parallel.run(train_network)
