"""Train a small network on digits, on all GPUs of one process with DataParallel."""

import torch
from digits import make_model, test_set, train_set
from torch.nn import DataParallel
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = DataParallel(make_model()).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
train = DataLoader(train_set, batch_size=128, shuffle=True)
test = DataLoader(test_set, batch_size=64)

for epoch in range(3):
    total_loss = 0.0
    for images, labels in train:
        images, labels = images.to(device), labels.to(device)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * len(labels)
    scheduler.step()

    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test:
            images, labels = images.to(device), labels.to(device)
            right += (model(images).argmax(1) == labels).sum().item()
    model.train()
    print(epoch, total_loss / len(train_set), right / len(test_set))

torch.save(model.module.state_dict(), "model.pt")
