"""How near a model's predictions are to others, in plain NumPy: the oracle of `kvcache.runner.fidelity`."""

from collections.abc import Sequence

import numpy as np
from support.attention import softmax

from kvcache import runner
from kvcache.models.weights import F32


def expected(found: Sequence[F32], exact: Sequence[F32], texts: Sequence[Sequence[int]]) -> runner.Fidelity:
    """Compare logits [n, vocab_size] of each text with the exact ones."""
    losses, divergences, kept = [], [], []
    for logits, wanted, text in zip(found, exact, texts, strict=True):
        (p, _), (q, _) = softmax(wanted.astype(np.float64)), softmax(logits.astype(np.float64))
        losses.append(np.mean([-np.log(q[i, text[i + 1]]) for i in range(len(text) - 1)]))
        divergences += [float(np.sum(p[i] * np.log(p[i] / q[i]))) for i in range(len(text))]
        kept += [int(np.argmax(p[i])) == int(np.argmax(q[i])) for i in range(len(text))]
    last = len(divergences) - 1
    quantile = np.interp(0.999 * last, range(last + 1), sorted(divergences))
    return runner.Fidelity(float(np.mean(losses)), float(np.mean(divergences)), float(quantile), float(np.mean(kept)))
