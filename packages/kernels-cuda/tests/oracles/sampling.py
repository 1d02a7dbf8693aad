"""Token choice in numpy, with a full sort, one row at a time."""

import numpy as np


def philox_word(key, position, token_ids, salt):
    """First word of Philox4x32-10 with key and counter (position, token id, salt, 0), uint64 arrays."""
    mask = np.uint64(0xFFFFFFFF)
    ids = np.asarray(token_ids).astype(np.uint64)
    key = int(key) & (2**64 - 1)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    c = [np.full_like(ids, int(position) & 0xFFFFFFFF), ids, np.full_like(ids, salt), np.zeros_like(ids)]
    for _ in range(10):
        even, odd = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (odd >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            odd & mask,
            (even >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            even & mask,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c[0]


def gumbel(key, position, token_ids, salt):
    u = (philox_word(key, position, token_ids, salt).astype(np.float64) + 0.5) / 2.0**32
    return -np.log(-np.log1p(-u))


def status(x):
    if np.isnan(x).any():
        return 1
    top = x.max()
    return 2 if top == np.inf else 3 if top == -np.inf else 0


def order(x):
    """Ids, larger first, lower id first among equals."""
    return np.lexsort((np.arange(len(x)), -x))


def kept(x, temperature, top_k, top_p, min_p):
    """Ids that stay, in order. x float64 without NaN."""
    ids = order(x)
    v = x[ids]
    keep = (v > -np.inf) & (v >= v[0] + (temperature * np.log(min_p) if min_p > 0 else -np.inf))
    if 0 < top_k < len(x):
        keep &= np.arange(len(x)) < top_k
    if top_p < 1.0:
        mass = np.where(keep, np.exp((v - v[0]) / temperature), 0.0)
        upto = mass.cumsum()
        keep &= upto - mass < top_p * upto[-1]
    keep[0] = True
    return ids[keep]


def sample(x, temperature, top_k, top_p, min_p, seed, position, salt):
    """(id, status, how far the best score is ahead of the next)."""
    state = status(x)
    if state:
        return 0, state, np.inf
    x = x.astype(np.float64)
    if not temperature > 0:
        return int(order(x)[0]), 0, np.inf
    temperature = float(np.float32(temperature))
    ids = kept(x, temperature, top_k, top_p, min_p)
    score = x[ids] / temperature + gumbel(seed, position, ids, salt)
    best = np.lexsort((ids, -score))
    lead = score[best[0]] - score[best[1]] if len(ids) > 1 else np.inf
    return int(ids[best[0]]), 0, lead


def logsumexp(x):
    x = x.astype(np.float64)
    top = x.max()
    if not np.isfinite(top):
        return top
    return top + np.log(np.exp(x - top).sum())


def penalise(x, counts, in_prompt, repetition, frequency, presence):
    x = x.astype(np.float64)
    touched = (counts > 0) | in_prompt
    scaled = np.where(x > 0, x / repetition, x * repetition)
    return np.where(touched, scaled - frequency * counts - presence * (counts > 0), x)
