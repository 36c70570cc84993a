"""Import all of an installed UniTrain that needs no extra, and take two steps on each backend: the start of README.md.

Prints a JSON object: where unitrain was imported from, the backends, and the loss after two steps on each.
"""

import json
import pkgutil
from importlib import import_module

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import unitrain
from unitrain.communication.backend import backend_names, load_backend

WITH_EXTRAS = ("unitrain.features.metrics_endpoint.endpoint", "unitrain.recipes", "unitrain.testing")
for module in pkgutil.walk_packages(unitrain.__path__, "unitrain."):
    if module.name.rpartition(".")[2] != "__main__" and not module.name.startswith(WITH_EXTRAS):
        import_module(module.name)

losses: dict[str, float | str] = {}
for backend in backend_names():
    load_backend(backend)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
    try:
        strategy = unitrain.init(backend=backend)
    except unitrain.BackendError as error:
        losses[backend] = str(error)
        continue
    with strategy:
        model = torch.nn.Linear(4, 2)
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for rows, labels in strategy.dataloader(samples, global_batch_size=8):
            result = strategy.step(F.cross_entropy(model(rows), labels), optimizer)
        assert result.stepped
        losses[backend] = F.cross_entropy(model(samples.tensors[0]), samples.tensors[1]).item()
print(json.dumps({"file": unitrain.__file__, "losses": losses}))
