"""``unitrain install-horovod``: builds Horovod against the installed torch, and tests it on two processes."""
