"""Prompts that begin as earlier ones did are not computed again: `PrefixCache` keeps what sequences leave behind.

`cache` is the face that users see, over the core's prefixes (src/prefix/). `keys` turns tokens into arrays, and names
the model and the cache. `fetching` gets blocks from a store, and `watch` carries new blocks there.
"""

from kvcache.prefix.cache import PrefixCache, PrefixEvent, PrefixStats

__all__ = ["PrefixCache", "PrefixEvent", "PrefixStats"]
