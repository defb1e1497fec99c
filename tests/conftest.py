"""Settings shared by all tests."""

import os

import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels of a GPU are tested where there is none
torch.set_num_threads(1)
settings.register_profile(
    "fedlaw", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("fedlaw")
