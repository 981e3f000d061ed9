"""A cache in NumPy that takes part in `kvcache.benchmarks`: docs/benchmarks.md says how."""

import numpy as np


class NumPyCache:
    """Rows in one f32 array for each layer and sequence, which grows by concatenation."""

    def __init__(self, case):
        if case.dtype != "f32":
            raise NotImplementedError("it stores f32 only")
        self.case, self.rows = case, {}

    def begin(self, num_tokens, seq_id=0):
        self.seq_id = seq_id

    def put(self, layer, k, v):
        old = self.rows.get((self.seq_id, layer))
        new = np.stack([k, v]).transpose(0, 2, 1, 3)  # [2, num_kv_heads, num_tokens, head_dim]
        self.rows[self.seq_id, layer] = new if old is None else np.concatenate([old, new], 2)

    def attend(self, layer, q):
        case, (k, v) = self.case, self.rows[self.seq_id, layer][:, :, -(self.case.window or 0) :]
        num_tokens, seen = len(q), k.shape[1]
        q = q.transpose(1, 0, 2).reshape(case.num_kv_heads, -1, case.head_dim)
        scores = (q @ k.transpose(0, 2, 1) * case.head_dim**-0.5).reshape(case.num_heads, num_tokens, seen)
        scores[:, ~np.tri(num_tokens, seen, seen - num_tokens, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = weights.reshape(case.num_kv_heads, -1, seen) @ v
        return out.reshape(case.num_heads, num_tokens, case.head_dim).transpose(1, 0, 2)

    def commit(self):
        pass

    def remove(self, begin, end):
        for layer in range(self.case.num_layers):
            self.rows[0, layer] = np.delete(self.rows[0, layer], slice(begin, end), 2)

    def gather(self, layer):
        return tuple(self.rows[0, layer])
