"""Code of README and docs: what stands in fenced blocks, and what a reader has who runs them.

Every fenced block names its language: `python` is run, page by page, in one namespace with the names below; `sh` are
commands, each run as `commands.py` does it; `text` is not run.
"""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "patches/README.md",
]
LANGUAGES = ("python", "sh", "text")


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: what stands behind the opening fence.
        line: number of its first line of code.
        code: the lines between the fences.
    """

    language: str
    line: int
    code: str


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    language, first, lines = None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = re.fullmatch(r"```(.*)", line)
        if fence is None:
            lines.append(line)
        elif language is None:
            language, first, lines = fence[1], number + 1, []
        else:
            found.append(Block(language, first, "\n".join(lines)))
            language = None
    assert language is None, f"{page.name}: a fence is not closed"
    return found


def run_python(page: str, folder: Path) -> None:
    """The Python blocks of a page, one after the other, for a process of its own with Megatron's groups."""
    torch.manual_seed(0)
    path = ROOT / page
    names = NAMES[page](folder) if page in NAMES else {}
    with contextlib.chdir(folder):
        for block in blocks(path):
            if block.language == "python":
                # Line numbers of the page, for the traceback.
                exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), names)


def _model(**sizes: Any) -> Any:
    from models import config, gpt

    return gpt(config(**sizes))


def _tensors(rows: int = 12, batch: int = 2, heads: int = 2, dim: int = 8) -> dict[str, Any]:
    """What an indexer makes of some rows; here a batch has 8 sequences in decode.md and two elsewhere."""
    return {
        "torch": torch,
        "key_TBD": torch.randn(rows, batch, dim),
        "gate_TBD": torch.randn(rows, batch, dim),
        "ape_JD": torch.randn(4, dim),
        "q_SBHD": torch.randn(rows, batch, heads, dim),
        "weights_SBH": torch.randn(rows, batch, heads),
        "position_S": torch.arange(rows),
    }


def _readme(folder: Path) -> dict[str, Any]:
    from models import config

    from mcore_dsa.binding import verify
    from mcore_dsa.megatron import kpool_dsa_layer_spec

    (folder / "configs").symlink_to(ROOT / "configs")
    geometry = verify(_checkpoint(folder / "GLM-5.3-Flash-BF16")).geometry
    held = _model(**_sizes_of(geometry))
    latent: Tensor = torch.randn(12, 2, 16)
    return _tensors() | {
        "my_layer_or_block_spec": kpool_dsa_layer_spec(config(), layer_number=1),
        # Not of the published size.
        "my_model": lambda config, spec: _model(),
        "tp_rank": 0,
        "tp_size": 1,
        "layer": held.decoder.layers[0],
        "valid_BT": torch.ones(2, 12, dtype=torch.bool),
        "latent_TBC": latent,
        "latent_q_SBHC": torch.randn(12, 2, 4, 16),
        "scale": 0.25,
    }


def _checkpoint(folder: Path) -> Path:
    from hf_checkpoints import checkpoint_tensors, tiny_config, write_checkpoint

    return write_checkpoint(folder, tiny_config(), checkpoint_tensors(tiny_config()))


def _sizes_of(geometry: Any) -> dict[str, Any]:
    """A model's sizes as a checkpoint's geometry has them."""
    return {
        "hidden_size": geometry.hidden_size,
        "num_attention_heads": geometry.num_attention_heads,
        "q_lora_rank": geometry.q_lora_rank,
        "kv_lora_rank": geometry.kv_lora_rank,
        "qk_head_dim": geometry.qk_nope_head_dim,
        "v_head_dim": geometry.v_head_dim,
        "dsa_indexer_n_heads": geometry.index_n_heads,
        "dsa_indexer_head_dim": geometry.index_head_dim,
        "dsa_indexer_topk": geometry.index_topk,
        "dsa_indexer_kpool": geometry.index_kpool,
    }


def _decode(folder: Path) -> dict[str, Any]:
    first, one = _tensors(batch=8), _tensors(rows=1, batch=8)
    valid = torch.arange(12) < torch.tensor([[12], [5], [9], [12], [1], [4], [12], [12]])
    return first | {
        "dtype": torch.bfloat16,
        "key_SBD": first["key_TBD"].bfloat16(),
        "gate_SBD": first["gate_TBD"].bfloat16(),
        "key_1BD": one["key_TBD"].bfloat16(),
        "gate_1BD": one["gate_TBD"].bfloat16(),
        "q_1BHD": one["q_SBHD"],
        "weights_1BH": one["weights_SBH"],
        "valid_BS": valid,
    }


def _replay(folder: Path) -> dict[str, Any]:
    from models import BATCH, ROWS, tokens
    from records import as_rollout, random_record

    lengths = [ROWS] * BATCH
    ids = tokens()
    return {
        "model": _model(dsa_indexer_topk=2048),
        "ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "rank": 0,
        "path": folder / "selections.safetensors",
        "requests": as_rollout(random_record(lengths, pool_size=4, budget=512)),
        "padded": lengths,
    }


def _training(folder: Path) -> dict[str, Any]:
    """A checkpoint of the job's, of a model in bf16 as its attention was trained, and the one that it came from."""
    from megatron.core import dist_checkpointing

    from mcore_dsa.binding import verify
    from mcore_dsa.checkpoint import load_attention
    from mcore_dsa.tp_plan import DsaTpPlan

    binding = verify(_checkpoint(folder / "GLM-5.3-Flash-BF16"))
    model = _model(**_sizes_of(binding.geometry), bf16=True).bfloat16()
    for held, layer in zip(model.decoder.layers, binding.layers, strict=False):
        held.self_attention.load_state_dict(load_attention(binding, layer, DsaTpPlan(0, 1, binding.geometry)))
    step = folder / "runs/tiny_tp2/checkpoints/step_00000100"
    step.mkdir(parents=True)
    dist_checkpointing.save(model.sharded_state_dict(), str(step))
    return {}


def _selection(folder: Path) -> dict[str, Any]:
    return {
        "q_SBHD": torch.randn(22, 1, 8, 16),
        "weights_SBH": torch.randn(22, 1, 8),
        "pool_key_PBD": torch.randn(5, 1, 16),
    }


class _Provider:
    """What a bridge's provider of models does with the function that it is given."""

    transformer_layer_spec: Any

    def provide(self, *, pre_process: bool, post_process: bool) -> Any:
        from megatron.core.models.gpt.gpt_model import GPTModel
        from models import ROWS, VOCAB, config

        own = config()
        ends = {"pre_process": pre_process, "post_process": post_process}
        return GPTModel(own, self.transformer_layer_spec(own), VOCAB, ROWS, position_embedding_type="none", **ends)


def _hosts(folder: Path) -> dict[str, Any]:
    return {"provider": _Provider()}


# What a page's reader has at hand, by page.
NAMES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "README.md": _readme,
    "docs/decode.md": _decode,
    "docs/hosts.md": _hosts,
    "docs/replay.md": _replay,
    "docs/selection.md": _selection,
    "docs/training.md": _training,
}
