"""Stream the text that a model generates, and measure what the cache was worth if that is asked for."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from kvcache import selecting
from kvcache.cache import KVCache
from kvcache.columns import NO_LIMIT, columns, print_error
from kvcache.eviction import Queries
from kvcache.layer import count, dtypes_for, suits
from kvcache.models.reading import expanded
from kvcache.models.tokenizer import Tokenizer, load_tokenizer
from kvcache.models.weights import F32, Tensors
from kvcache.runner import llama
from kvcache.runner.evaluate import EVAL_TOKENS, Report, compare_dtypes, read_windows, seconds_without_cache
from kvcache.runner.generate import (
    Options,
    Speed,
    Speeds,
    evict_prompt,
    generate,
    new_cache,
    num_dropped_by_shift,
    sample,
)
from kvcache.runner.llama import Llama, LlamaConfig, LlamaError

STEPS_WITHOUT_CACHE = 8  # decode steps that are repeated without the cache
INTERRUPTED = 130  # the exit status that shells use: 128 + SIGINT


def run(
    path: str | Path,
    prompt: bytes,
    options: Options,
    out: TextIO,
    *,
    on_prefill: Callable[[int, int], None] | None = None,
) -> int:
    """Load a model, stream a continuation of the prompt, and end with a table if `options` ask for it.

    An interrupt (Ctrl-C) ends the text, or the measuring after it, and the table shows the measurements made by then.
    Each line of the table is written once it is measured. Notices go to stderr: one says what is measured; without
    the table, one says the speeds. The text ends where the model ends it; without a window or a shift, also when the
    model's context is full.

    With a window the text continues beyond the context. Positions keep growing, but rotary attention depends on
    distances only, and within the window distances stay in the range of the training. Distances to sink tokens grow,
    which a model tolerates for a few of them. With a shift, a full context drops its older half and moves the rest
    down: positions stay in the range of the training.

    Parameters
    ----------
    path : str or Path
        A Hugging Face folder or a GGUF file. The element types are compared on an ``eval.txt`` in the folder or beside
        the file, if there is one.
    prompt : bytes
        The text to continue, at least one byte.
    options : Options
        The settings.
    out : TextIO
        The stream that the text and the table are written to.
    on_prefill : callable, optional
        A function called before a prompt of several batches and after each of them, with the number of tokens done, and
        of those to compute. The prompt is then written after the last call.

    Returns
    -------
    int
        The exit status: 0, or 130 after an interrupt.

    Raises
    ------
    ModelFileError
        The model's files cannot be used.
    LlamaError
        The prompt, the type, the window or the sink tokens do not fit the model.
    ImportError
        A package that reads this model is not installed.
    """
    if not prompt:
        raise LlamaError("the prompt is empty")
    config = LlamaConfig.read(path)  # refuses a model of another family by its name, whatever its tokenizer is
    tokenizer, model = load_tokenizer(path), Llama.from_tensors(config, Tensors(expanded(path)))
    tokens = tokenizer.encode(prompt)
    room = _room(model.config, tokens, options)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    tabulates = options.compare and not options.quiet
    windows: list[list[int]] = []
    if tabulates:  # a file that cannot be used is refused before the text
        windows = read_windows(folder / "eval.txt", tokenizer, min(config.max_seq_len, EVAL_TOKENS))
    speeds = Speeds()
    cache = new_cache(model.config, options)
    text = _Text(out, tokenizer)
    status = 0
    try:
        try:
            with cache:
                most = min(room, options.max_new_tokens)
                on_batch = _begin(text, prompt, len(tokens), on_prefill)
                ended = _stream(model, cache, tokens, options, speeds, most, text, on_batch)
        finally:
            text.end()
        if not options.quiet:
            _notice_limits(model.config, options, len(tokens), full=not ended and room < options.max_new_tokens)
    except KeyboardInterrupt:
        status = INTERRUPTED
    if tabulates:
        report = Report(model.config, options, speeds, columns(NO_LIMIT, out))
        if not _tabulate(out, report, None if status else _Measuring(model, tokens, folder, windows)):
            status = INTERRUPTED
    out.flush()
    if not options.compare and not options.quiet:
        print_error(f"({speeds.line()})")
    return status


def _room(config: LlamaConfig, prompt: Sequence[int], options: Options) -> int:
    """Return the most tokens that may be generated; refuse options that do not fit the model."""
    context = config.max_seq_len
    if not prompt:
        raise LlamaError("the prompt has no token")
    config.check_tokens(prompt)
    if not suits(options.dtype, config.head_dim):
        raise LlamaError(f"{options.dtype} stores 32 elements at a time, and the model's head_dim is {config.head_dim}")
    if options.select is not None and context < (least := selecting.least_tokens(options.select)):
        raise LlamaError(f"rows are selected from {least:,} tokens on, and the model's context has {context:,}")
    if options.shift and options.first_tokens_kept > context // 2:
        raise LlamaError(
            f"a shift can keep at most half of the model's context, {context // 2:,} sink tokens,"
            f" not {options.first_tokens_kept:,}"
        )
    if options.window is None:
        if len(prompt) >= context:
            raise LlamaError(
                f"the prompt of {len(prompt):,} tokens leaves no room in the model's context of {context:,}"
            )
        return options.max_new_tokens if options.shift else context - len(prompt)
    if options.window + options.first_tokens_kept > context:
        raise LlamaError(
            f"window and sink tokens may together be at most the model's context, {context:,},"
            f" not {options.window + options.first_tokens_kept:,}"
        )
    return options.max_new_tokens


class _Text:
    """Write tokens as text that is safe for a terminal."""

    def __init__(self, out: TextIO, tokenizer: Tokenizer) -> None:
        self.out, self.tokenizer = out, tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.last = ""

    def write(self, data: bytes) -> None:
        # Replace control characters: a model may write any byte.
        text = [c if c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in self.decoder.decode(data)]
        self.last = text[-1] if text else self.last
        self.out.write("".join(text))
        self.out.flush()

    def end(self) -> None:
        """End the last line."""
        if self.last != "\n":
            self.out.write("\n")


def _stream(
    model: Llama,
    cache: KVCache,
    tokens: list[int],
    options: Options,
    speeds: Speeds,
    max_new_tokens: int,
    text: _Text,
    on_batch: Callable[[int, int], None] | None,
) -> bool:
    """Write the text that follows a prompt, and append its tokens to it; return whether the model ended it."""
    rng = np.random.default_rng(options.seed)

    def choose(logits: F32) -> int:
        return sample(logits, rng, temperature=options.temperature, top_p=options.top_p)

    def evict(queries: Queries) -> None:
        speeds.num_kept = evict_prompt(model, cache, tokens, options, queries)

    for token in generate(
        model,
        cache,
        [*tokens],
        max_new_tokens,
        choose,
        prefill=speeds.prefill,
        decode=speeds.decode,
        num_tokens_kept=options.first_tokens_kept if options.shift else None,
        select=options.select,
        prompts=options.prompts,
        evict=None if options.keep is None else evict,
        on_prefill=on_batch,
    ):
        tokens.append(token)
        if token in text.tokenizer.stop:
            return True
        text.write(text.tokenizer.decode([token]))
    return False


def _begin(
    text: _Text, prompt: bytes, num_tokens: int, on_prefill: Callable[[int, int], None] | None
) -> Callable[[int, int], None] | None:
    """Write a prompt.  A prompt of several batches is written after the last one, by the function to call after each.

    So the bar of `on_prefill` begins a line, and erasing it does not erase the prompt's last line.
    """
    if on_prefill is None or num_tokens <= llama.PREFILL_TOKENS:
        text.write(prompt)
        return None

    def on_batch(done: int, total: int) -> None:
        on_prefill(done, total)
        if done == total:
            text.write(prompt)

    on_prefill(0, num_tokens)
    return on_batch


def _notice_limits(config: LlamaConfig, options: Options, num_tokens: int, *, full: bool) -> None:
    """Print a notice if a text reached the limits of the model's training."""
    if full:
        print_error(
            f"(stopped at {num_tokens:,} tokens, the model's whole context; with a window or a shift it would go on)"
        )
    elif options.window and options.first_tokens_kept and num_tokens > config.max_seq_len:
        print_error("(the sink tokens ended up further back than the model was trained to look)")


@dataclass(frozen=True)
class _Measuring:
    """A measurement after a text: its model, its tokens, and the texts of a folder to compare the types on."""

    model: Llama
    tokens: list[int]
    folder: Path
    windows: list[list[int]]


def _tabulate(out: TextIO, report: Report, asked: _Measuring | None) -> bool:
    """Write the table, each line as soon as it is measured; return False if an interrupt ended the measuring.

    If `asked` is not given, nothing more is measured: an interrupt ended the text.
    """

    def write(*lines: str) -> None:
        out.write("".join(f"{line}\n" for line in lines))
        out.flush()

    rest = ["", *report.speed_lines(), "", *report.sizes()]  # to write where an interrupt comes
    try:
        lengths = [] if asked is None else _plan(report, asked)
        write("", *report.speed_lines())
        rest = ["", *report.sizes()]
        if asked is not None and lengths:
            seconds = seconds_without_cache(asked.model, report.options, asked.tokens, lengths)
            write(report.line_without_cache(Speed(len(lengths), sum(seconds))))
        if asked is not None and asked.windows:
            for dtype, fidelity in compare_dtypes(asked.model, report.options, asked.windows):
                write(*(["", report.heading()] if rest else []), report.row(dtype, fidelity))
                rest = []
    except KeyboardInterrupt:
        asked = None
    write(*rest)
    return asked is not None


def _plan(report: Report, asked: _Measuring) -> list[int]:
    """Return the lengths of decode steps to repeat without the cache; say what is measured."""
    config, lengths, steps = asked.model.config, list[int](), report.speeds.decode.tokens
    if steps:
        # The sequence's lengths at evenly spread decode steps.
        spread = np.linspace(len(asked.tokens) - steps, len(asked.tokens) - 1, STEPS_WITHOUT_CACHE)
        lengths = [int(length) for length in np.unique(spread.astype(int))]
        if report.options.shift:
            lengths = [_held(n, config.max_seq_len, report.options.first_tokens_kept) for n in lengths]
    windows = asked.windows
    if not windows:
        its = "an empty" if (asked.folder / "eval.txt").exists() else "no"
        print_error(f"({asked.folder} has {its} eval.txt to compare the types on)")
    parts = [f"{count(len(lengths), 'step')} without the cache"] if lengths else []
    if windows:
        most = max(map(len, windows))
        types = count(len(dtypes_for(config.head_dim)), "type")
        parts.append(f"{types} on {count(len(windows), 'text')} of {most:,} tokens")
    if parts:
        print_error(f"(measuring {', then '.join(parts)}; Ctrl-C ends it)")
    return lengths


def _held(num_tokens: int, context: int, num_tokens_kept: int) -> int:
    """Return how many tokens a shifting context holds once a text has `num_tokens` tokens."""
    dropped = num_dropped_by_shift(context, num_tokens_kept)
    return num_tokens if num_tokens <= context else context - dropped + 1 + (num_tokens - context - 1) % dropped
