"""``unitrain verify``: does a model train the same on every backend and launcher of this machine?

Every case is trained by a loop of plain PyTorch on one device, which uses none of UniTrain, and by a strategy in each
world that can be started here. Each rank writes down what it did; what is compared never passes through the backend
that is on trial.
"""
