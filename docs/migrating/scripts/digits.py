"""The data and the network of the scripts in this folder: scikit-learn's handwritten digits, and two layers."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.get_default_dtype())
data = TensorDataset(images, torch.tensor(digits.target))
train_set = Subset(data, range(1408))
test_set = Subset(data, range(1408, 1796))


def make_model() -> nn.Module:
    """Return a network with random weights."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
