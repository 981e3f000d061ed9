"""`Tenant`: one of those who share a store, what its values are bound to, and what was counted for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvcache.stores import values

__all__ = ["Tenant"]


@dataclass(eq=False)
class Tenant:
    """What is needed to make and to check a tenant's values, and its share in what happened.

    `digest` stands for the model and the shape, `secret` is the key of the MAC, and no payload has more than
    `most_bytes`. All other fields are used under the store's lock.
    """

    digest: bytes
    secret: bytes | None
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
        """The most bytes to read of a value: of one that is too long a part, which is refused as any that was cut."""
        return values.HEADER_SIZE + self.most_bytes + 1

    def name(self, key: str) -> tuple[object, ...]:
        """Return what a key and whatever makes its value right are together: equal names, one read."""
        return self.digest, self.secret, self.most_bytes, self.only_keys, key
