"""Attention in plain NumPy, and the only softmax of the tests in Python."""

import numpy as np


def softmax(scores, sinks=-np.inf):
    """Return the weights of scores [..., rows] beside sinks [...], and the log of the sum: 0 and -inf of no rows."""
    top = np.maximum(scores.max(-1), sinks)
    top = np.where(top > -np.inf, top, 0).astype(scores.dtype)
    powers = np.exp(scores - top[..., None])
    total = powers.sum(-1) + np.exp(sinks - top)
    with np.errstate(divide="ignore"):
        return powers / np.where(total > 0, total, 1)[..., None], top + np.log(total)


def weigh(q, k, seen=True, bias=0, *, scale=None, softcap=None, sinks=-np.inf):
    """Return the weights [heads, tokens, rows] that queries [tokens, heads, dim] give to rows, and lse [tokens, heads].

    Keys are [rows, KV heads, dim]. `seen` [tokens, rows] says which rows a token sees. `bias`, up to [heads, tokens,
    rows], is added to the scores.
    """
    q, k = q.astype(np.float64), np.repeat(k.astype(np.float64), q.shape[1] // k.shape[1], axis=1)
    scores = q.transpose(1, 0, 2) @ k.transpose(1, 2, 0) * (q.shape[2] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    weights, lse = softmax(np.where(seen, scores + bias, -np.inf), np.reshape(sinks, (-1, 1)))
    return weights, lse.T


def attend(q, k, v, *visibility, **options):
    """Return what queries get of rows whose values are [rows, KV heads, dim]; other arguments as for weigh()."""
    weights, _ = weigh(q, k, *visibility, **options)
    v = np.repeat(v.astype(np.float64), q.shape[1] // v.shape[1], axis=1)
    return (weights @ v.transpose(1, 0, 2)).transpose(1, 0, 2)
