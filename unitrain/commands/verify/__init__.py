"""``unitrain verify``: checks that a model trains the same with every backend and launcher of this machine.

Every case is trained by a loop of plain PyTorch on one device, and by a strategy in each world that can be started.
Each rank records its training in a file: the comparison does not depend on the backend that is verified.
"""
