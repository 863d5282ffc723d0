"""Settings shared by all tests."""

import torch
from hypothesis import settings

# Timing on a shared machine says nothing, so no deadline; the same examples on every run, so that a failure is a change in the code.
settings.register_profile("mcore_dsa", deadline=None, derandomize=True)
settings.load_profile("mcore_dsa")

torch.set_num_threads(1)
