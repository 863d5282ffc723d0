"""How far attention in fp32, of fp32 or bf16 inputs, may be from float64: derived, element by element.

Notation: u the unit roundoff of fp32, `out` that of the results' dtype, `split` what the two bf16 parts of a weight may
leave out of it, C channels, W slots, `a` the greatest `scale |q| . |kv|` of a head, `A` that of `|out_grad| . |kv|`.
First-order terms, each with room for the few operations around it:

- A logit is off by `(C + 8) u a`. The base-2 logarithms of sums are logits too, so that a weight, an exponential of a
  difference, is off by `r = 2 (C + 8) u a + (W + 16) u` of itself; of that W u are the sum of exponentials.
- An output by `(r + split + W u) sum(p |kv|)`, and its rounding.
- A weight's gradient and delta are at most `A`, and off by `(C + W + 8) u A`; a logit's gradient then by `p E` with
  `E = 2 A (r + split + (C + 2 W + 16) u)`. The output's rounding goes in squared: `2 A out**2`.
- A query's gradient by `scale E sum(p |kv|)`, a latent's by `sum(p (r + split + N u) |out_grad| + scale p (E + 2 A N u)
  |q|)` over its N pairs of row and head, and their rounding.
"""

import torch
from attend_cases import Case
from torch import Tensor

U = 2.0**-24


def dense(case: Case) -> tuple[Tensor, Tensor]:
    """Of a float64 case the weights and which tokens rows attend, `[s, b, h, t]` and `[s, b, 1, t]`."""
    token_BSW = case.tokens().long()
    tokens = case.kv.shape[0]
    seen = torch.zeros(*token_BSW.shape[:2], tokens + 1, dtype=torch.bool)
    seen = seen.scatter_(2, token_BSW.masked_fill(token_BSW < 0, tokens), True)[..., :tokens]
    seen = seen.transpose(0, 1).unsqueeze(2)
    logits = case.scale * torch.einsum("sbhc,tbc->sbht", case.q, case.kv)
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights.masked_fill(~seen.any(-1, keepdim=True), 0.0), seen


def error_bounds(case: Case, *, out: float, split: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of output, gradient of queries, gradient of latents; `case` in float64."""
    weights, seen = dense(case)
    q, kv, out_grad, scale = case.q.abs(), case.kv.abs(), case.out_grad.abs(), case.scale
    channels, slots = q.shape[3], max(1, case.tokens().shape[2])
    pairs = q.shape[0] * q.shape[2]

    def greatest(x: Tensor) -> Tensor:
        products = torch.einsum("sbhc,tbc->sbht", x, kv) * seen
        return products.amax(-1, keepdim=True) if products.shape[-1] else products.sum(-1, keepdim=True)

    r = 2 * (channels + 8) * U * scale * greatest(q) + (slots + 16) * U
    size = greatest(out_grad)
    e = 2 * size * (r + split + (channels + 2 * slots + 16) * U) + 2 * size * out**2
    mixture = torch.einsum("sbht,tbc->sbhc", weights, kv)
    of_value = torch.einsum("sbht,sbhc->tbc", weights * (r + split + pairs * U), out_grad)
    of_key = torch.einsum("sbht,sbhc->tbc", scale * weights * (e + 2 * size * pairs * U), q)
    exact = case.run_oracle()
    first = ((r + split + slots * U) * mixture, scale * e * mixture, of_value + of_key)
    # What fp32 holds no more, of some hundred factors and terms.
    return tuple(bound + out * want.abs() + 2.0**-100 for bound, want in zip(first, exact, strict=True))
