"""What every test starts from: one thread, a seed of its own, Hypothesis without a clock."""

import os
import tempfile
import zlib

import pytest
import torch
from hypothesis import settings

from heaps import DEVICE, ON_GPU

settings.register_profile("railwave", deadline=None, max_examples=30)
settings.register_profile("ci", settings.get_profile("railwave"), derandomize=True)
settings.register_profile("gpu", settings.get_profile("railwave"), max_examples=12)
settings.load_profile("gpu" if ON_GPU else "ci" if os.environ.get("CI") else "railwave")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed(request):
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def device(request):
    """Let tests of kernels make their tensors where the kernels run."""
    kernels = request.module.__name__.startswith("test_kernels_")
    torch.set_default_device(DEVICE if kernels and ON_GPU else None)
    yield
    torch.set_default_device(None)


@pytest.fixture
def poison_empty():
    """Make torch.empty give NaN or the largest int, so that reading it shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def shm_folder():
    """Make a folder in shared memory for `railwave.heap.shm.FOLDER`: other jobs are not in it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder
