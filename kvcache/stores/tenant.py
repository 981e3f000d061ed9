"""`Tenant`: one user of a shared store, and its counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False)
class Tenant:
    """A tenant, whose values have at most `most_bytes`. Its fields that change are used under the store's lock."""

    most_bytes: int
    only_keys: bool = False  # it asks which keys there are, and reads no values
    counts: Counter[str] = field(default_factory=Counter)
    value_bytes: int = 0  # of the latest values, about
    patience: float = 0.0  # seconds after which the store has failed to answer, as the latest read said
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.value_bytes = min(1 << 20, self.most_bytes)

    @property
    def most_to_read(self) -> int:
        """The most bytes to read of a value.  A longer value is cut, and refused like any cut value."""
        return self.most_bytes + 1

    def name(self, key: str) -> tuple[object, ...]:
        """Return what tells reads of a key apart: tenants with equal names of it share one read."""
        return self.most_bytes, self.only_keys, key
