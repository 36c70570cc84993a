"""``unitrain install-horovod``: builds Horovod against the installed torch, and proves it on two processes."""
