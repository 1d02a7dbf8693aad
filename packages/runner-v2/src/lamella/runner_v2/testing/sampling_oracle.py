"""Sampling written from its definitions, one token at a time, in Python floats: what every kernel is held against.

Nothing here is shared with the sampler. Where rounding may move the border of min-p or top-p by a token, `choices`
gives every id that a correct sampler may return.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lamella.runner_v2.sampling.params import RowParams

_TWO_32 = 2**32


def philox_words(counter: Sequence[int], key: int) -> list[int]:
    """Philox4x32-10: four 32-bit words of a counter of four words and a 64-bit key."""
    x = list(counter)
    k = [key % _TWO_32, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ k[0], b % _TWO_32, (a >> 32) ^ x[3] ^ k[1], a % _TWO_32]
        k = [(k[0] + 0x9E3779B9) % _TWO_32, (k[1] + 0xBB67AE85) % _TWO_32]
    return x


def noise(seed: int, position: int, token_id: int, salt: int = 0) -> float:
    """Gumbel noise of one token."""
    word = philox_words((position, token_id, salt, 0), seed % 2**64)[0]
    u = (word + 0.5) / _TWO_32
    return -math.log(-math.log1p(-u))


def transformed(
    logits: Sequence[float],
    params: RowParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    allowed: Sequence[bool] | None = None,
) -> list[float]:
    """Logits after mask, allowed ids, bias, min_tokens, penalties and bad words; output_ids includes the drafts."""
    x = list(logits)
    if allowed is not None:
        x = [v if a else -math.inf for v, a in zip(x, allowed)]
    if params.allowed_ids is not None:
        x = [v if i in params.allowed_ids else -math.inf for i, v in enumerate(x)]
    for token_id, bias in params.logit_bias:
        x[token_id] += bias
    if len(output_ids) < params.min_tokens:
        for token_id in params.stop_ids:
            if token_id < len(x):
                x[token_id] = -math.inf
    for token_id in range(len(x)):
        count = list(output_ids).count(token_id)
        if count or token_id in prompt_ids:
            r = params.repetition_penalty
            x[token_id] = x[token_id] / r if x[token_id] > 0 else x[token_id] * r
        x[token_id] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    for word in params.bad_words:
        prefix = list(word[:-1])
        if not prefix or list(output_ids)[-len(prefix) :] == prefix:
            x[word[-1]] = -math.inf
    return x


def kept(x: Sequence[float], params: RowParams, slack: float = 0.0) -> list[int]:
    """Ids that survive min-p, top-k and top-p, in order; slack stretches the bounds."""
    order = sorted((i for i in range(len(x)) if x[i] > -math.inf), key=lambda i: (-x[i], i))
    top = x[order[0]]
    p = {i: math.exp((x[i] - top) / params.temperature) for i in order}
    if params.min_p > 0:
        order = [i for i in order if p[i] >= min(1.0, params.min_p * (1.0 - slack))]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        target = params.top_p * (1.0 + slack) * math.fsum(p[i] for i in order)
        mass, count = 0.0, 0
        while count < len(order) and (count == 0 or mass < target):
            mass += p[order[count]]
            count += 1
        order = order[:count]
    return order


def choices(x: Sequence[float], params: RowParams, position: int) -> set[int]:
    """Ids that may be chosen from transformed logits; one, unless rounding can move a border."""
    if params.temperature < 1e-5:
        return {min(range(len(x)), key=lambda i: (-x[i], i))}
    found = set()
    for slack in (0.0, -2e-6, 2e-6):
        ids = kept(x, params, slack)
        found.add(max(ids, key=lambda i: (x[i] / params.temperature + noise(params.seed, position, i), -i)))
    return found


def logprobs(logits: Sequence[float]) -> list[float]:
    """Log-softmax of raw logits."""
    top = max(logits)
    total = top + math.log(math.fsum(math.exp(v - top) for v in logits))
    return [v - total for v in logits]
