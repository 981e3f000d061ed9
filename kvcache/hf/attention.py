"""The attention implementation ``"kvcache"``.

A model hands it lazy tensors, which stand for all rows of a layer (`kvcache.hf.layers`). The kernels attend over these
rows where they lie, if they know the mask and all other arguments. Otherwise, the rows are decoded to dense tensors.
A pass is a forward pass of the model. A column is a place in the text, padding included; the offset of a row of the
batch is the column of its first token. A source layer attends over an encoder's rows. An expansion stands for keys and
values that the model makes of latents.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcache.errors import NotSupportedError
from kvcache.hf.choosing import Chosen, Compressed
from kvcache.hf.dense import NAME
from kvcache.hf.layers import Expansion, Layer, LayerRows, Rows
from kvcache.hf.lazy import ChosenMask, Mask, elements_of, is_shown
from kvcache.hf.passes import ForwardPass
from kvcache.hf.told import count_leading, masked_ranges, refuse_padding, shown_columns

UNKNOWN = {"sinks"}  # what a few models pass to their own attention only
SPECIAL = {"position_bias", *UNKNOWN}  # what the kernels have no argument for, beside dropout


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    compressed: Compressed | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, for transformers: query ``[batch, heads, tokens, dim]``, result ``[batch, tokens, heads, dim]``.

    `indices` are the columns that an indexer chose, ``[batch, tokens, n]``, and `block_indices` the blocks of columns,
    ``[batch, KV heads, tokens, n]``. `compressed` are rows that each query sees beside the keys.
    """
    given, rows, expansion = attention_mask, _untouched(key, value), None
    if rows is None and (expansion := Expansion.of(key, value)) is not None:
        rows = expansion.rows
    is_causal = getattr(module, "is_causal", True) and options.get("is_causal") is not False
    chosen = None
    if isinstance(given, ChosenMask):
        chosen, attention_mask = Chosen(given.columns, 1, hides_padding=given.mask is None), given.mask
    if indices is not None:
        chosen = Chosen(indices, 1)
    if block_indices is not None:
        block = getattr(getattr(module, "indexer", None), "block_size", 0) or _refuse("block_indices")
        chosen = Chosen(block_indices, block)
    is_special = bool(options.get("dropout"))
    for name in SPECIAL & options.keys():
        is_special |= options[name] is not None
    is_known = rows is not None and (chosen is None or chosen.fits(rows, attention_mask))
    if rows is not None and is_known and not is_special and _kernels_know(attention_mask, rows.layer, is_causal):
        padding = attention_mask.padding if isinstance(attention_mask, Mask) else None
        sinks = None if s_aux is None else s_aux.detach().float()
        q = query if expansion is None else expansion.absorb(query)
        known: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": sinks}
        if rows.layer.is_source:
            out: torch.Tensor | None = _attend_source(rows, q, padding, known)
        else:
            out = _attend(rows, q, padding, known, chosen, compressed)
        if out is not None:
            return out if expansion is None else expansion.expand(out), None
    for name in UNKNOWN & options.keys():
        if options[name] is not None:
            _refuse(name)
    chosen = None if isinstance(given, ChosenMask) else chosen  # the mask's elements have it
    unknown = _name_unknown(module, options, is_known, attention_mask)
    key, value, mask = _decode(rows, key, value, given, query.shape[2], unknown)
    if rows is not None:
        _note_fallback(rows, query, expansion, is_special, {"scale": scaling, "softcap": softcap, "sinks": s_aux})
    if compressed is not None:
        key, value, mask = compressed.join(key, value, mask)
    has_sdpa = softcap is None and s_aux is None
    mask = _complete(mask, query, key, is_causal, chosen, has_sdpa)
    if has_sdpa:
        options = {"dropout": 0.0, **options, "is_causal": mask is None and is_causal}
        out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
        return out, None
    if is_special:
        raise NotSupportedError("dropout or a bias by position, with softcap or sinks: use the model's eager attention")
    return attend_dense(query, key, value, mask, scaling, softcap, s_aux), None


def _refuse(name: str) -> NoReturn:
    """Raise for an argument of another attention, which changes its result."""
    raise NotSupportedError(f"the attention {NAME!r} has no argument {name}: set the model's own, 'eager'")


# ---- with the kernels


def _untouched(key: torch.Tensor, value: torch.Tensor) -> LayerRows | None:
    """Return the rows that two tensors stand for; None: they are no lazy tensors of one layer, or were touched."""
    if type(key) is not Rows or type(value) is not Rows or key.made is not None or value.made is not None:
        return None
    return key.source if key.source is value.source and (key.part, value.part) == (0, 1) else None


def _kernels_know(mask: torch.Tensor | None, layer: Layer, is_causal: bool) -> bool:
    """Whether the kernels can attend with this mask; without one, a module says itself whether it is causal."""
    if not isinstance(mask, Mask):
        return mask is None and (is_causal or layer.is_source)
    has_order = mask.is_plain and mask.sees_all == layer.is_source and mask.made is None
    return has_order and (layer.is_source or mask.window == layer.window or not layer.follows_config)


def _attend(
    rows: LayerRows, q: torch.Tensor, padding: torch.Tensor | None, options: dict[str, Any], chosen: Chosen | None,
    compressed: Compressed | None,
) -> torch.Tensor | None:  # fmt: skip
    """Attend over a layer's rows. First store the new ones. None: the kernels do not know this mask."""
    layer, passes = rows.layer, rows.layer.passes
    this_pass = rows.this_pass
    if this_pass is None or this_pass is not passes.last:
        this_pass = rows.current_pass()
    if not this_pass.is_open:
        assert rows.new is not None
        passes.open(this_pass, len(rows.new[0]), rows.new[0].shape[2], padding)
    if padding is not None and layer.is_chunked:
        leading = count_leading(shown_columns(padding, passes.num_seen + this_pass.num_tokens))
        if leading != this_pass.offsets:  # the mask's chunks begin behind the padding that it hides, the layer's do not
            return None
    if passes.queries is not None:
        passes.note_queries(passes.queries, this_pass, layer.index, q, options)
    has_padding = padding is not None or (any(this_pass.offsets) and not (chosen is not None and chosen.hides_padding))
    options["masked"] = (passes.masked(this_pass, padding) if has_padding else None) or None
    if chosen is not None and this_pass.batch is not None:
        options |= chosen.options(this_pass, options["masked"])
    elif layer.num_selected is not None and this_pass.selects:
        options["select"] = layer.num_selected
        passes.calls["select"] += 1
    return _run(this_pass, layer, q, this_pass.pending.pop(layer.index, ()), options, compressed)


def _attend_source(
    rows: LayerRows, q: torch.Tensor, padding: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """Attend over an encoder's rows. In the first pass, first store them."""
    layer, passes = rows.layer, rows.layer.passes
    this_pass = passes.reach(layer.index) if rows.this_pass is None else rows.current_pass()
    if not this_pass.is_open:
        passes.open(this_pass, len(q), q.shape[2], None)
    if (new := this_pass.pending.pop(layer.index, None)) is not None:
        passes.put_source(this_pass, layer.index, *new)
    options["masked"] = None
    if padding is not None:
        shown = shown_columns(padding, rows.num_columns)
        options["masked"] = masked_ranges(shown, passes.seq_ids, [0] * len(passes.seq_ids)) or None
    return _run(this_pass, layer, q, (), options)


def _run(
    this_pass: ForwardPass, layer: Layer, q: torch.Tensor, new: tuple[torch.Tensor, ...], options: dict[str, Any],
    compressed: Compressed | None = None,
) -> torch.Tensor:  # fmt: skip
    """Store new rows, keys and values, if there are any; then attend."""
    batch_size, num_heads, num_tokens, head_dim = q.shape
    if num_tokens < this_pass.num_tokens:  # queries of the last tokens only: pad with zeros, and cut the result
        wide = q.new_zeros(batch_size, num_heads, this_pass.num_tokens, head_dim)
        wide[:, :, -num_tokens:] = q
        return _run(this_pass, layer, wide, new, options, compressed)[:, -num_tokens:].contiguous()
    layer.passes.calls["kernel"] += 1
    options["precision"] = layer.passes.cache._prompts
    # Results of two layers are joined as floats, and rounded once.
    dtype = q.dtype if compressed is None else torch.float32
    out = torch.empty(batch_size, num_tokens, num_heads, layer.decoder.v_dims[layer.index], dtype=dtype)
    if this_pass.batch is None:
        out.zero_()
    else:
        options |= {"layout": "BHTD", "out": out.transpose(1, 2)}
        if this_pass.not_padding is not None:
            q, *packed = this_pass.drop_padding(q, *new)
            new = (*packed,)
            options |= {"layout": "THD", "out": torch.empty(len(q), *out.shape[2:], dtype=dtype)}
        if compressed is not None:
            options["prior"] = compressed.attend(this_pass.batch, q, options)
        this_pass.batch.attend(layer.index, q, *new, **options)
        if this_pass.not_padding is not None:
            out.zero_()
            out[this_pass.not_padding] = options["out"]
    layer.passes.note_done(this_pass, layer.index)
    return out.to(q.dtype)


# ---- with dense tensors


def _name_unknown(
    module: torch.nn.Module, options: dict[str, Any], is_known: bool, mask: torch.Tensor | None
) -> str:  # fmt: skip
    """Say what of a call the kernels cannot do. `is_known` says whether they can take its choice of rows."""
    what = "a mask" if mask is not None else "tokens that see later ones"
    what = what if is_known else "a choice of rows"
    what = "dropout" if options.get("dropout") else what
    what = next((name for name in SPECIAL if options.get(name) is not None), what)
    return f"a {type(module).__name__} brings {what}, which the kernels do not know"


def _decode(
    rows: LayerRows | None, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, num_queries: int,
    unknown: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the elements of keys, values and a mask; raise if this shows padding that was not stored.

    `unknown` says what of the call the kernels do not know.
    """
    if rows is not None:
        rows.unknown = unknown
    key, value, mask = elements_of([key, value, mask])
    if rows is not None and rows.new is not None:
        _check_mask(rows, mask, num_queries)
    return key, value, mask


def _note_fallback(
    rows: LayerRows, query: torch.Tensor, expansion: Expansion | None, is_special: bool, options: dict[str, Any]
) -> None:
    """Note for `HFCache.evict` the queries of a call whose mask the kernels do not know.

    `is_special` says that they do not know what else the layer is given, whatever the mask is.
    """
    layer, queries = rows.layer, rows.layer.passes.queries
    if layer.is_source:
        return
    this_pass = rows.current_pass()
    if is_special:
        this_pass.without_kernels.add(layer.index)
    elif queries is not None:
        q = query if expansion is None else expansion.absorb(query)
        layer.passes.note_queries(queries, this_pass, layer.index, q, options)


def _complete(
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    is_causal: bool,
    chosen: Chosen | None,
    has_sdpa: bool,
) -> torch.Tensor | None:
    """Return a mask that hides later keys as well, if torch would not, and keys that an indexer did not choose.

    `has_sdpa` says that torch's attention gets the mask; otherwise `attend_dense` does.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    # Without a mask, torch's function hides later keys itself, from the first query and the first key on. These are of
    # the same token only if there are as many queries as keys. `attend_dense` hides none.
    hides_later = has_sdpa and chosen is None and num_queries == num_keys
    if mask is None and is_causal and num_queries > 1 and not hides_later:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    if chosen is None:
        return mask
    shown = chosen.shown(query.shape[1], num_keys)
    if mask is None or mask.dtype == torch.bool:
        return shown if mask is None else mask & shown
    return mask.masked_fill(~shown, torch.finfo(mask.dtype).min)


def _check_mask(rows: LayerRows, mask: torch.Tensor | None, num_queries: int) -> None:
    """Raise if a mask of elements, ``[batch, heads, queries, columns]``, shows padding that was not stored."""
    this_pass = rows.this_pass
    assert this_pass is not None
    num_seen = this_pass.num_seen + this_pass.num_tokens
    first = num_seen - rows.num_columns  # the first column's token
    for row, offset in enumerate(this_pass.offsets):
        query = max(0, offset - (num_seen - num_queries))  # the first that is no padding itself
        if offset <= first or query >= num_queries:
            continue
        if mask is not None:
            part = mask[row if len(mask) > 1 else 0, :, query:, : offset - first]
            if not is_shown(part).any():
                continue
        refuse_padding(row, offset)


def flex_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
) -> Any:
    """Attend as transformers' ``"flex_attention"``, which torch compiles whole: it cannot decode rows on the way."""
    return flex_attention_forward(module, query, *elements_of([key, value]), *args, **options)


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with softcap or sinks, which torch's attention lacks; the mask is of bool, or is added to the scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, torch.finfo(scores.dtype).min)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:  # logits of keys without values
        scores = torch.cat([scores, sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v).transpose(1, 2).contiguous()
