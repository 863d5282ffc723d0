"""The training job: `torchrun ... -m mcore_dsa.train --config FILE`."""
