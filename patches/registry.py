"""What a patch is, and how patches are checked and installed."""

import importlib.metadata
import logging
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

logger = logging.getLogger("mcore_dsa.patches")


class MissingSymbolError(RuntimeError):
    """A patch names a symbol that the installed megatron-core does not have."""


@dataclass(frozen=True)
class Patch:
    """One temporary change.

    `symbols` are `module:qualname` names that must exist before anything is installed. `skip` returns why this
    process does not need the change (mended upstream, another package present), or None where it does.
    """

    name: str
    symbols: tuple[str, ...]
    reason: str
    install: Callable[[], None]
    skip: Callable[[], str | None] = lambda: None
    only_without_cuda: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of one patch: `why` is its reason if `replaced`, else why it was skipped."""

    name: str
    replaced: bool
    why: str


@dataclass(frozen=True)
class PatchReport:
    megatron_version: str
    outcomes: tuple[Outcome, ...]

    @property
    def replaced(self) -> tuple[str, ...]:
        return tuple(outcome.name for outcome in self.outcomes if outcome.replaced)

    @property
    def skipped(self) -> dict[str, str]:
        return {outcome.name: outcome.why for outcome in self.outcomes if not outcome.replaced}


def apply_patches(patches: Sequence[Patch]) -> PatchReport:
    """Check every patch, then install those that are needed: a missing symbol leaves Megatron untouched."""
    version = importlib.metadata.version("megatron-core")
    has_cuda = torch.cuda.is_available()
    outcomes = []
    needed = []
    for patch in patches:
        if patch.only_without_cuda and has_cuda:
            outcomes.append(Outcome(patch.name, False, "CUDA is available"))
            continue
        _require_symbols(patch, version)
        why_not = patch.skip()
        outcomes.append(Outcome(patch.name, why_not is None, why_not or patch.reason))
        if why_not is None:
            needed.append(patch)
    for patch in needed:
        patch.install()
    for outcome in outcomes:
        logger.info("%s %s: %s", "replaced" if outcome.replaced else "skipped", outcome.name, outcome.why)
    return PatchReport(version, tuple(outcomes))


def _require_symbols(patch: Patch, version: str) -> None:
    for symbol in patch.symbols:
        try:
            pkgutil.resolve_name(symbol)
        except (AttributeError, ImportError) as error:
            raise MissingSymbolError(
                f"megatron-core is {version}, without {symbol} ({error}); accepted is >=0.19,<0.20: patch "
                f"{patch.name!r} replaces it, and patches/README.md says what for"
            ) from error
