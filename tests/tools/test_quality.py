"""bench/bench_quality.py: outliers change no prediction, and each column is what its heading says."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
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
    quality.print_types([quality.Setting(each, texts) for each in models])
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


def test_columns_of_policies(quality, model, texts, monkeypatch, capsys):
    policy = SlidingWindow(64, num_sink_tokens=4)
    monkeypatch.setattr(quality, "POLICIES", [policy])
    quality.print_policies(quality.Setting(model, texts))
    _, _, row = rows_of(capsys.readouterr().out)
    assert row == [f"`{policy!r}`", "68", *wanted([model], texts, dtype="f32", policy=policy)]
