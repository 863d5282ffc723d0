"""Settings shared by the tests that need CUDA; as in tests/, for a machine with devices."""

import os

from hypothesis import settings

settings.register_profile("mcore_dsa", deadline=None, derandomize=True)
settings.load_profile("mcore_dsa")

# For the processes that tests start. Compiling Megatron's small fusions takes longer than all the tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
