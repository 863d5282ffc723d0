"""The only Megatron code of this package."""
