"""``kvcache serve``: a model of transformers behind OpenAI's interface, many requests at once on one cache.

A request comes in through these modules:

- `application` has the routes;
- `fields` checks what a client sends;
- `keys` says who may ask, and `turns` whose turn it is;
- `model` makes tokens of text, and hands them to `kvcache.hf.Engine`.

Its tokens come back through `text` (characters and stop sequences), `speech` (thoughts, calls of tools) and `answers`
(JSON).
"""
