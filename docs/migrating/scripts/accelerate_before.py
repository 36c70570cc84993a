"""Train a small network on digits with Hugging Face's Accelerate, under accelerate launch or torchrun."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import make_model, test_set, train_set
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
train = DataLoader(train_set, batch_size=128 // accelerator.num_processes, shuffle=True)
test = DataLoader(test_set, batch_size=64)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

for epoch in range(3):
    total_loss = torch.zeros((), device=accelerator.device)
    for images, labels in train:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        total_loss += loss.detach() * len(labels)
    total_loss = accelerator.reduce(total_loss, "sum")
    scheduler.step()

    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test:
            predicted, labels = accelerator.gather_for_metrics((model(images).argmax(1), labels))
            right += (predicted == labels).sum().item()
    model.train()
    accelerator.print(epoch, total_loss.item() / len(train_set), right / len(test_set))

accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
accelerator.end_training()
