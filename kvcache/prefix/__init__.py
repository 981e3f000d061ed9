"""Prompts that begin as earlier ones did are not computed again: `PrefixCache` keeps what sequences leave behind.

`keys` names blocks of tokens, `nodes` keeps them as a tree, `chunks` finds tokens that follow others, `rows` carries
blocks to and from a store, `watch` notes what happens to the sequences of a cache, and `cache` is what users see.
"""

from kvcache.prefix.cache import PrefixCache, PrefixStats

__all__ = ["PrefixCache", "PrefixStats"]
