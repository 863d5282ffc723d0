"""Callers under `torch.compile`: the public functions run as they are, at every length."""

import os
import subprocess
import sys

PROGRAM = """
import torch
from mcore_dsa import PoolLayout, compress_keys, expand_selection, fused_qk_topk_kpool, select_pools, sparse_attention

def caller(q, key, weights, latent_q):
    _, token_ids = fused_qk_topk_kpool(q * 1.0, key, weights, 8, 4, key.flip(0), torch.zeros(4, 16))
    layout = PoolLayout.dense(len(q), pool_size=4)
    pools = compress_keys(key + 0.0, key.flip(0), torch.zeros(4, 16), layout)
    position = torch.arange(len(q))
    selection = select_pools(q, weights, pools, layout, position, budget=2)
    tokens = expand_selection(selection, layout, position, always_select_tail=True)
    out = sparse_attention(
        latent_q, latent_q[:, :, 0], selection, layout, position, softmax_scale=0.1, always_select_tail=True
    )
    return token_ids + 1, tokens + 1, out * 2.0

compiled = torch.compile(caller, backend="eager")
for rows in (40, 61, 83, 200):
    made = [torch.randn(shape) for shape in ((rows, 1, 8, 16), (rows, 1, 16), (rows, 1, 8), (rows, 1, 4, 16))]
    for left, right in zip(compiled(*made), caller(*made), strict=True):
        assert torch.equal(left, right), rows
print("equal")
"""


def test_a_compiled_caller_gets_the_same_at_every_length() -> None:
    """At the second length it failed inside, where sizes become symbols."""
    environ = os.environ | {"TORCHDYNAMO_DISABLE": "0"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
