"""Prompts that begin as earlier ones did are not computed again: `PrefixCache` keeps what sequences leave behind.

A call goes downward: `cache` is what users see; `sessions` retains what acquired sequences fill, `fetching` carries
blocks to and from a store, and `reuse` finds tokens that follow others; `tree` has the known blocks, `rows` turns their
rows into bytes, `watch` notes what happens to the sequences of a cache, and `keys` names blocks.
"""

from kvcache.prefix.cache import PrefixCache, PrefixStats

__all__ = ["PrefixCache", "PrefixStats"]
