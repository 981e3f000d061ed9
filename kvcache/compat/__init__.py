"""The interfaces of caches that people come from, as small classes over `kvcache.KVCache`.

Each module has one system's interface, with its names in Python's case. So a runner can be moved first and changed
later:

- `zigllama`: ZigLlama's ``inference.kv_cache``;
- `ollama`: Ollama's ``kvcache``;
- `rust_kvcache`: ``KvCache`` and ``PagedKvCache``, head-major, in Rust;
- `forgellm`: ``forgellm_runtime::KVCache``;
- `edifice`: ``Edifice.Blocks.KVCache``.

Below each stands a `kvcache.KVCache`, in the attribute `cache`, for what the interface does not have: saving, forks,
other element types, attention over the rows where they lie. Use an object from one thread at a time.
"""
