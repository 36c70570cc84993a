"""``unitrain verify``: checks that a model trains the same with every backend and launcher of this machine.

Every case is trained by a loop of plain PyTorch on one device, without UniTrain, and by a strategy in each world that
can be started here. Each rank records its training in a file, so that the comparison does not depend on the backend
that is verified.
"""
