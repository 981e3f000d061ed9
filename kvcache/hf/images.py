"""Names for the tokens in the place of images and videos, so that a cache knows them again.

`generate` has a model encode its images before the text. The features then stand in place of the tokens, in order. A
name is a number that follows from an image's digest and a place in it. The modality is "image" or "video".
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from transformers import GenerationMixin, PreTrainedConfig
from transformers.generation.utils import _slice_mm_encoder_output as features_at

from kvcache.hf.told import FEATURES, NAMED, NONE, READ, TYPES, Images, has_others, without_images

MODALITIES = ("image", "video")  # by the number that TYPES has for their tokens, from 1
GRIDS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
# Of images alone, all with an element for each image.
SINGLE = ("pixel_values", "image_sizes", "pixel_attention_mask", "spatial_shapes")
NESTED = ("pixel_values", "pixel_attention_mask")  # or, for models without sizes, with axes of rows and a row's images
# How `generate` repeats features for beams. Models with methods of their own may have another order of images.
EXPAND = {
    name: getattr(GenerationMixin, name) for name in ("_expand_inputs_for_generation", "_expand_multimodal_outputs")
}
PLACE = re.compile("(image|video|audio)_token_(id|index)")  # of a configuration's fields
SOME = (
    "input_ids has the tokens of more images than are given: give all images of the text, in its order, or none if the"
    " cache holds all"
)
# The arguments of `generate` that are of the text. Features may follow from any other tensor.
OF_TEXT = ("input_ids", "inputs", "attention_mask", TYPES, "token_type_ids")

Given: TypeAlias = Mapping[str, Any]


def images_of(model: Any, input_ids: torch.Tensor, model_kwargs: Given, given: Given | None, num_beams: int) -> Images:
    """Return a text with names for the tokens of its images.

    `model_kwargs` are what `generate` has made of its arguments, `given`, None if these are not known; `num_beams` rows
    are of the same prompt. Two columns have the same name only if they have the same place in the same image, as far as
    the model is given it. Raise ``ValueError`` if some images of the text are given, and others not.
    """
    config, outputs = model.config, model_kwargs.get(FEATURES) or {}
    tokens, places = input_ids.to(torch.int64, copy=True), places_in(config, input_ids)
    if _has_features(without_images(model_kwargs)):  # sound, or images that are encoded with the text
        return Images(tokens, torch.zeros_like(places), places, False, False)
    lacking, unnamed, has_names = places, torch.zeros_like(places), bool(outputs)
    positions = model_kwargs.get("position_ids")
    counts_size = isinstance(positions, torch.Tensor) and positions.ndim == 3
    shown = None if given is None else _arguments(model, given)
    is_known = given is not None and all(given.get(name) is None for name in (FEATURES, "position_ids"))
    is_known &= num_beams == 1 or all(getattr(type(model), name) is method for name, method in EXPAND.items())
    types = None if given is None else given.get(TYPES)
    is_known &= _has_types(config, input_ids, model_kwargs.get(TYPES))
    for modality, output in outputs.items():
        is_place, sizes = input_ids == _token_of(config, modality), _sizes(output)
        lacking = lacking & ~is_place
        if sizes and sum(sizes) < is_place.sum():
            raise ValueError(SOME)
        is_named = False
        if is_known and shown is not None and sizes and not len(sizes) % num_beams:
            digests = _digests(shown, modality, len(sizes) // num_beams, counts_size and types is not None)
            is_named = _name(tokens, is_place, sizes, digests, num_beams)
        if not is_named:
            tokens[is_place] = input_ids[is_place]
            unnamed, has_names = unnamed | is_place, False
    text = config.get_text_config(decoder=True)
    is_causal = not getattr(text, "use_bidirectional_attention", None)  # an image's tokens see later ones
    is_causal &= counts_size or model_kwargs.get(TYPES) is None
    has_names &= not bool(lacking.any())
    return Images(tokens, lacking, unnamed, has_names, is_causal and not has_others(without_images(model_kwargs)))


def check_sizes(given: Given) -> None:
    """Raise ValueError if `generate` is given sizes of images or of videos, and the text has those without sizes, too.

    Their features could not be told apart.
    """
    types, grids = given.get(TYPES), {name: given.get(GRIDS[name][1]) for name in MODALITIES}
    if isinstance(types, torch.Tensor) and any(grid is not None for grid in grids.values()):
        for number, modality in enumerate(MODALITIES, 1):
            if grids[modality] is None and (types == number).any():
                raise ValueError(SOME)


def places_in(config: PreTrainedConfig, input_ids: torch.Tensor) -> torch.Tensor:
    """Return which tokens stand for a piece of an image or sound, ``[batch, columns]``; of an encoder's texts, none."""
    found = [] if config.is_encoder_decoder else [v for k, v in vars(config).items() if PLACE.fullmatch(k)]
    return torch.isin(input_ids, torch.tensor([token for token in found if isinstance(token, int)], dtype=torch.long))


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


def features_behind(config: PreTrainedConfig, input_ids: torch.Tensor, features: Given, begin: int) -> Given:
    """Return the features of images whose tokens come behind some columns; all of them if these have none."""
    if not features or not places_in(config, input_ids[:, :begin]).any():
        return features
    if not all(_sizes(output) for output in features.values()):
        return features
    return features_between(config, {"input_ids": input_ids, FEATURES: features}, begin, input_ids.shape[1])


def _has_features(inputs: Given) -> bool:
    """Whether arguments have tensors of floating point, as an encoder takes them: no masks, and no sizes or times."""
    return any(
        isinstance(one, torch.Tensor) and one.is_floating_point() and one.ndim > 1
        for name, value in inputs.items()
        if name not in READ
        for one in (value if isinstance(value, (list, tuple)) else (value,))
    )


def _token_of(config: PreTrainedConfig, modality: str) -> int:
    """Return the token that stands in the place of a piece of an image; NONE: the model has no such token."""
    token = getattr(config, f"{modality}_token_id", None)
    return NONE if token is None else token


def _has_types(config: PreTrainedConfig, input_ids: torch.Tensor, types: torch.Tensor | None) -> bool:
    """Whether the types of tokens say where images are, and nothing else.

    Models that count height and width take them for that. Others let the tokens of an image see later ones.
    """
    if types is None:
        return True
    wanted = torch.zeros_like(input_ids)
    for number, modality in enumerate(MODALITIES, 1):
        wanted[input_ids == _token_of(config, modality)] = number
    return torch.equal(types.long(), wanted)


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
    """Return the arguments that features and positions follow from, as far as is known: tensors and plain values.

    None if the model's encoder takes an argument of another type, of which there is no digest.
    """
    shown: dict[str, Any] = {}
    for name in sorted(given):
        if isinstance(given[name], torch.Tensor) and name not in OF_TEXT:
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
    """Put names for the tokens of images; return whether each prompt has whole images, and all of them.

    `digests` are of all prompts' images. `sizes` are of all rows' images: those of a prompt come again for each beam.
    """
    digests_left, sizes_left = [*digests], [*sizes]
    for row in range(0, len(tokens), num_beams):
        names: list[int] = []
        num_images, num_tokens = 0, int(is_place[row].sum())
        while len(names) < num_tokens and num_images < len(digests_left):
            names += (_name_of(digests_left[num_images], place) for place in range(sizes_left[num_images]))
            num_images += 1
        if len(names) != num_tokens:
            return False
        del digests_left[:num_images], sizes_left[: num_images * num_beams]
        for beam in range(row, row + num_beams):
            if int(is_place[beam].sum()) != num_tokens:
                return False
            tokens[beam, is_place[beam]] = torch.tensor(names, dtype=tokens.dtype)
    return not digests_left


def _name_of(digest: bytes, place: int) -> int:
    """Return a number below NAMED for a token of an image, by its place among the image's tokens."""
    named = hashlib.blake2b(digest + place.to_bytes(8, "little"), digest_size=8).digest()
    return NAMED - 1 - (int.from_bytes(named, "little") >> 3)
