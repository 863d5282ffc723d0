"""Settings shared by all tests."""

import os

import torch
from hypothesis import settings

# Timing on a shared machine says nothing, so no deadline; the same examples on every run, so that a new failure is a
# change in the code.
settings.register_profile("mcore_dsa", deadline=None, derandomize=True)
# For `make soak`: other examples with every --hypothesis-seed, which alone says which, so nothing is remembered.
settings.register_profile("soak", deadline=None, database=None, print_blob=True)
settings.load_profile("mcore_dsa")

# Ranks and pytest workers share the cores: more threads than one in each only wait for one another. The variables are
# for the processes that tests start, and make `pytest` alone run as `make test` does.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
