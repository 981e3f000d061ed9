"""``kvcache serve``: a model of transformers behind OpenAI's interface, many requests at once on one cache.

A request goes through `application` (routes), `fields` (what a client may send), `keys` and `turns` (who may ask, and
whose turn it is), `model` (text becomes tokens, and options those of `generate`), and `kvcache.hf.Engine`. Its tokens
come back through `text` (characters and stop sequences), `speech` (thoughts and calls of tools) and `answers` (JSON).
"""
