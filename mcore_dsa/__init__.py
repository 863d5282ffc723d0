"""DeepSeek Sparse Attention with a k-pool lightning indexer, its query rows sharded over tensor parallelism.

Importing this package needs torch only; ``mcore_dsa.megatron`` and ``mcore_dsa.train`` need Megatron-Core.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
