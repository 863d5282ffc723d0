"""Names that are None without Transformer Engine and that Megatron uses unconditionally, on every device."""

import importlib

from mcore_dsa.patches.registry import Patch

ABSORBED_MLA = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
HYBRID_BLOCK = "megatron.core.models.hybrid.hybrid_block"
TE_EXTENSION = "megatron.core.extensions.transformer_engine"


def _have_te() -> bool:
    return bool(importlib.import_module(TE_EXTENSION).HAVE_TE)


def _skip_linear() -> str | None:
    if _have_te():
        return "Transformer Engine is installed: TELinear is its own"
    return None if importlib.import_module(ABSORBED_MLA).TELinear is None else "mended upstream: TELinear is not None"


def _install_linear() -> None:
    from mcore_dsa.megatron.backend import DuplicatedLinear

    vars(importlib.import_module(ABSORBED_MLA)).update(TELinear=DuplicatedLinear)


def _skip_norm() -> str | None:
    return "Transformer Engine is installed: TENorm is its own" if _have_te() else None


def _install_norm() -> None:
    from mcore_dsa.megatron.backend import RMSNorm

    vars(importlib.import_module(HYBRID_BLOCK)).update(TENorm=RMSNorm)


PATCHES = (
    Patch(
        "absorbed_mla.TELinear",
        (f"{ABSORBED_MLA}:TELinear", f"{TE_EXTENSION}:HAVE_TE"),
        "AbsorbedMLASelfAttention takes a replicated down-projection only by the identity of TELinear, None here",
        _install_linear,
        _skip_linear,
    ),
    Patch(
        "hybrid_block.TENorm",
        (f"{HYBRID_BLOCK}:TENorm", f"{TE_EXTENSION}:HAVE_TE"),
        "HybridStack builds its final norm as TENorm, whatever the specification says",
        _install_norm,
        _skip_norm,
    ),
)
