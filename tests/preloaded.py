"""What the fork server imports, so that its ranks need not: one that uses Megatron starts in a third of the time (M).

The server keeps all of it out of garbage collection, which would copy the pages that a rank shares with it.
"""

import gc
import importlib

for name in (
    "torch",
    "pytest",
    "hypothesis.strategies",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.models.hybrid.hybrid_model",
    # What schedules, optimizers and checkpoints import when they are first used.
    "megatron.core.models.mimo",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "torch.utils.serialization.config",
    "transformers.models.glm5_next.modeling_glm5_next",
    "mcore_dsa.patches",
    "mcore_dsa.train.checkpointing",
    "mcore_dsa.train.job",
    "hf_checkpoints",
    "packs",
    "train_layouts",
):
    importlib.import_module(name)
gc.collect()
gc.freeze()
