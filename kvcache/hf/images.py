"""Names for the tokens in the place of images and videos, so that a prefix cache knows them again.

`generate` has a model encode its images before the text. The features then stand in place of the tokens, in order.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationMixin, PreTrainedConfig
from transformers.generation.utils import _slice_mm_encoder_output as features_at

from kvcache.hf.told import FEATURES, TYPES, UNKNOWN, has_others, without_images

MODALITIES = ("image", "video")  # by the number that TYPES has for their tokens, from 1
GRIDS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
# Of images alone, all with an element for each image.
SINGLE = ("pixel_values", "image_sizes", "pixel_attention_mask", "spatial_shapes")
NESTED = ("pixel_values", "pixel_attention_mask")  # or, for models without sizes, with axes of rows and a row's images
# How `generate` repeats features for beams. Models with methods of their own may have another order of images.
EXPAND = {
    name: getattr(GenerationMixin, name) for name in ("_expand_inputs_for_generation", "_expand_multimodal_outputs")
}
NO_IMAGES = ("input_ids", "inputs", "attention_mask", TYPES)  # of the arguments of generate

Given: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Images:
    """Prompts with images, as a prefix cache knows them."""

    tokens: torch.Tensor  # [batch, columns], for an image's tokens negative numbers that follow from the image
    positions: npt.NDArray[np.int64] | None  # where the model counts height and width, [axes, batch, columns]


def images_of(model: Any, input_ids: torch.Tensor, model_kwargs: Given, given: Given, num_beams: int) -> Images | None:
    """Return prompts with names for the tokens of their images; None if rows follow from more, or there is no image.

    `model_kwargs` are what `generate` has made of its arguments, `given`; `num_beams` rows are of the same prompt. Two
    columns have the same name only if they have the same place in the same image, as far as the model is given it.
    """
    outputs, positions = model_kwargs.get(FEATURES), model_kwargs.get("position_ids")
    if not outputs or any(given.get(name) is not None for name in (FEATURES, "position_ids")):
        return None
    if has_others(without_images(model_kwargs)):
        return None
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "use_bidirectional_attention", None):  # an image's tokens see later ones
        return None
    if num_beams > 1 and any(getattr(type(model), name) is not method for name, method in EXPAND.items()):
        return None
    counts_size = isinstance(positions, torch.Tensor) and positions.ndim == 3
    if not _has_types(model.config, input_ids, model_kwargs.get(TYPES), counts_size):
        return None
    shown = _arguments(model, given)
    if shown is None:
        return None
    tokens = input_ids.to(torch.int64, copy=True)
    for modality, output in outputs.items():
        sizes, place = _sizes(output), _token_of(model.config, modality)
        if not sizes or place is None or len(sizes) % num_beams:
            return None
        digests = _digests(shown, modality, len(sizes) // num_beams, counts_size and given.get(TYPES) is not None)
        if not _name(tokens, input_ids == place, sizes, digests, num_beams):
            return None
    return Images(tokens, model_kwargs["position_ids"].numpy(force=True) if counts_size else None)


def features_between(config: PreTrainedConfig, inputs: Given, begin: int, end: int) -> dict[str, Any]:
    """Return the features of images whose tokens are in some columns, of those that a call of a model is given."""
    found = {}
    for modality, output in inputs[FEATURES].items():
        is_place = inputs["input_ids"] == _token_of(config, modality)
        rows = is_place.flatten().cumsum(0).view_as(is_place) - 1
        here = rows[:, begin:end][is_place[:, begin:end]]
        if len(here):
            found[modality] = features_at(output, here)
    return found


def _token_of(config: PreTrainedConfig, modality: str) -> int | None:
    """Return the token that stands in the place of a piece of an image; None: the model has no such token."""
    return getattr(config, f"{modality}_token_id", None)


def _has_types(
    config: PreTrainedConfig, input_ids: torch.Tensor, types: torch.Tensor | None, counts_size: bool
) -> bool:
    """Whether the types of tokens say where images are, and nothing else.

    Models that count height and width take them for that. Others let the tokens of an image see later ones.
    """
    if types is None:
        return True
    wanted = torch.zeros_like(input_ids)
    for number, modality in enumerate(MODALITIES, 1):
        place = _token_of(config, modality)
        if place is not None:
            wanted[input_ids == place] = number
    return counts_size and torch.equal(types.long(), wanted)


def _sizes(output: Any) -> list[int] | None:
    """Return how many features each image has; None if they cannot be told apart."""
    if not isinstance(output, Mapping):
        return None
    features, deep = output.get("pooler_output"), output.get("deepstack_features")
    if features is None or not all(isinstance(image, torch.Tensor) for image in features):
        return None
    if deep is not None and not (len(deep) and isinstance(deep[0][0], torch.Tensor)):  # transformers cannot cut others
        return None
    return [image.numel() // image.shape[-1] for image in features]


def _arguments(model: Any, given: Given) -> dict[str, Any] | None:
    """Return the arguments that features and positions follow from; None if they are of other types."""
    shown: dict[str, Any] = {}
    for name in sorted(given):
        if isinstance(given[name], torch.Tensor) and name not in NO_IMAGES:
            shown[name] = given[name]
    for modality in MODALITIES:
        encode = getattr(model.base_model, f"get_{modality}_features", None)
        for name in () if encode is None else inspect.signature(encode).parameters:
            value = given.get(name)
            if isinstance(value, bool | int | float | str):
                shown[name] = value
            elif value is not None and name not in shown:
                return None
    return shown


def _digests(shown: Given, modality: str, num_images: int, has_types: bool) -> list[bytes]:
    """Return a digest for each image of a modality: of what was given for it, or of all that was given."""
    parts = _parts(shown, modality, num_images)
    if parts is None:
        everything = _digest([part for name in sorted(shown) for part in (name, shown[name])])
        parts = ((everything, number) for number in range(num_images))
    return [_digest((modality, has_types, *part)) for part in parts]


def _parts(shown: Given, modality: str, num_images: int) -> Iterable[Sequence[Any]] | None:
    """Return what was given for each image, with the names of arguments; None if this cannot be told."""
    pixels, grid = (shown.get(name) for name in GRIDS[modality])
    if pixels is None:
        return None
    if grid is not None and {*shown} <= {name for names in GRIDS.values() for name in names}:
        counts = grid.prod(-1).tolist()
        if len(grid) != num_images or sum(counts) != len(pixels):
            return None
        names: Sequence[str] = GRIDS[modality]
        parts = zip(pixels.split(counts), grid, strict=True)
    elif modality == "image" and {*shown} <= {*SINGLE}:
        is_nested = pixels.ndim > 4 and {*shown} <= {*NESTED}
        values = [value.flatten(0, 1) if is_nested else value for value in shown.values()]
        has_rows = pixels.ndim > 4 and not is_nested and "image_sizes" not in shown
        if has_rows or any(len(value) != num_images for value in values):  # some may be padding
            return None
        names, parts = [*shown], zip(*values, strict=True)
    else:
        return None
    return ((*names, *part) for part in parts)


def _digest(parts: Sequence[Any]) -> bytes:
    """Return a digest of tensors, with their types and shapes, and of plain values."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        if isinstance(part, torch.Tensor):
            digest.update(repr((part.dtype, [*part.shape])).encode())
            digest.update(part.detach().contiguous().view(-1).view(torch.uint8).numpy(force=True).data)
        else:
            digest.update(repr(part).encode() + b"\0")
    return digest.digest()


def _name(
    tokens: torch.Tensor, is_place: torch.Tensor, sizes: Sequence[int], digests: Sequence[bytes], num_beams: int
) -> bool:
    """Put names for the tokens of images; return whether each prompt has whole images, and all of them."""
    num_named, num_sizes = 0, 0
    for row in range(0, len(tokens), num_beams):
        names: list[int] = []
        first, num_tokens = num_sizes, int(is_place[row].sum())
        while len(names) < num_tokens and num_sizes < len(sizes):
            digest = digests[(num_named + num_sizes - first) % len(digests)]
            names += (_name_of(digest, place) for place in range(sizes[num_sizes]))
            num_sizes += 1
        if len(names) != num_tokens:
            return False
        num_named += num_sizes - first
        num_sizes += (num_sizes - first) * (num_beams - 1)  # of the other beams
        for beam in range(row, row + num_beams):
            if int(is_place[beam].sum()) != num_tokens:
                return False
            tokens[beam, is_place[beam]] = torch.tensor(names, dtype=tokens.dtype)
    return num_named == len(digests) and num_sizes == len(sizes)


def _name_of(digest: bytes, place: int) -> int:
    """Return a number below UNKNOWN for a token of an image, by its place among the image's tokens."""
    named = hashlib.blake2b(digest + place.to_bytes(8, "little"), digest_size=8).digest()
    return UNKNOWN - 1 - (int.from_bytes(named, "little") >> 2)
