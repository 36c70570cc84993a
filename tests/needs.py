"""What a test can't do without, and what to do where it is skipped for want of it."""

from importlib.util import find_spec

import pytest

HOROVOD = pytest.mark.skipif(
    find_spec("horovod") is None, reason="Horovod is not installed: unitrain install-horovod adds it"
)
