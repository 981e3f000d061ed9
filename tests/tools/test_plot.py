"""kvcache.plot draws what the cache holds, and names that can be read; how a figure looks is not tested further."""

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import kvcache

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.text import Text

import kvcache.plot
from kvcache import ChunkedAttention, CrossAttention, FullAttention, KVCache, SlidingWindow
from kvcache.layer import DTYPES

ROW_BYTES = {"f32": 512, "f16": 256, "q8_0": 4 * 34, "q4_0": 4 * 18}  # of 128 elements


def new_axes():
    return Figure(figsize=(3.3, 2.5), layout="constrained").add_subplot()


# ---- memory


def test_memory_is_what_the_types_take():
    caches = {dtype: KVCache(3, 2, 128, None, dtype=dtype) for dtype in ROW_BYTES}
    lines = kvcache.plot.memory(caches, 1000).lines
    assert [line.get_label() for line in lines] == list(ROW_BYTES)
    for line, nbytes in zip(lines, ROW_BYTES.values(), strict=True):
        tokens, drawn = line.get_data()
        assert tokens[-1] == 1000
        np.testing.assert_array_equal(drawn, tokens * 3 * 2 * 2 * nbytes)


def test_memory_of_several_sequences_and_what_is_free():
    cache = KVCache(2, 4, 64, None)
    one, four = (kvcache.plot.memory({"f16": cache}, 1000, sequences=n, free=1 << 20) for n in (1, 4))
    assert (four.lines[0].get_ydata() == 4 * np.array(one.lines[0].get_ydata())).all()
    assert [line.get_label() for line in four.lines] == ["f16", "free"]
    assert set(four.lines[1].get_ydata()) == {1 << 20}
    assert (one.get_title(loc="left"), four.get_title(loc="left")) == (
        "Memory of one sequence", "Memory of 4 sequences")  # fmt: skip
    for wrong in ({"sequences": 0}, {"free": -1}):
        with pytest.raises(ValueError, match="{}={}".format(*next(iter(wrong.items())))):
            kvcache.plot.memory({"f16": cache}, 1000, **wrong)


@pytest.mark.parametrize(
    ("free", "said"), [(20 << 30, "\u2191 free: 20.0 GiB"), (1000, "\u2193 free: 1000 B"), (0, "0 B")]
)
def test_free_memory_far_from_the_lines_leaves_them_the_picture(free, said):
    cache = KVCache(2, 4, 64, None)
    alone, beside = (kvcache.plot.memory({"f16": cache}, 1000, free=free) for free in (None, free))
    assert [line.get_label() for line in beside.lines] == ["f16"]
    assert beside.get_ylim() == alone.get_ylim()
    assert [text.get_text() for text in beside.texts if said in text.get_text()]


def test_memory_is_what_the_policies_take():
    window, chunks = SlidingWindow(10, num_sink_tokens=2, resume_window=20), ChunkedAttention(8, resume_window=4)
    caches = {
        "window": KVCache(1, 1, 128, None, policy=window),
        "chunks": KVCache(1, 1, 128, None, policy=chunks),
        "one of each": KVCache(3, 1, 128, None, policy=[window, FullAttention(), None]),
        "cross": KVCache(1, 1, 128, None, policy=CrossAttention(7)),
        "max_seq_len": KVCache(1, 1, 128, 50),
    }
    lines = kvcache.plot.memory(caches, 100).lines
    n = lines[0].get_xdata()
    rows = [np.minimum(n, 22), np.minimum(n, 12), np.minimum(n, 22) + n, np.full(len(n), 7), np.minimum(n, 50)]
    for line, expected in zip(lines, rows, strict=True):
        np.testing.assert_array_equal(line.get_ydata(), expected * 2 * 256)


def test_memory_is_what_a_cache_comes_to():
    """But for the bookkeeping, and for pages: blocks this small take no more than they store."""
    policy = SlidingWindow(6, num_sink_tokens=1)
    cache = KVCache(1, 1, 32, None, policy=policy, dtype="q8_0", block_size=1)
    line = kvcache.plot.memory({"q8_0": cache}, 20).lines[0]
    for tokens, drawn in zip(*line.get_data(), strict=True):
        while cache.next_position() < tokens:
            with cache.batch(1) as batch:
                batch.put(0, *np.ones((2, 1, 1, 32), np.float32))
        assert drawn == cache.stats()["live_slots"] * 2 * 34


def test_memory_names_its_lines():
    caches = {"f16": KVCache(1, 1, 128, None), "bf16": KVCache(1, 1, 128, None, dtype="bf16")}
    ax = kvcache.plot.memory(caches, 1000)
    assert [text.get_text() for text in ax.texts] == ["f16", "bf16"]
    low, high = sorted(text.get_position()[1] for text in ax.texts)  # they would lie on each other
    assert (high - low) * ax.get_window_extent().height > 8.5
    ax = kvcache.plot.memory({"a name as long as the picture is wide, or longer": caches["f16"]}, 1000, new_axes())
    assert not ax.texts
    assert [text.get_text().replace("\n", " ") for text in ax.get_legend().get_texts()] == [ax.lines[0].get_label()]


@pytest.mark.parametrize(
    ("caches", "max_tokens", "error", "words"),
    [
        ({}, 100, ValueError, "caches={}: must have at least one"),
        (KVCache(1, 1, 8, None), 100, TypeError, "caches=<KVCache"),
        ({"a": 3}, 100, TypeError, r"caches\['a'\]=3: must be of type KVCache"),
        ({"a": KVCache(1, 1, 8, None, policy=[None])}, 100, ValueError, r"caches\['a'\].*stores anything"),
        ({"a": KVCache(1, 1, 8, None)}, 1, ValueError, "max_tokens=1: must be at least 2"),
        ({"a": KVCache(1, 1, 8, None)}, 2.5, TypeError, r"max_tokens=2\.5: an integer is needed"),
    ],
)
def test_memory_refuses(caches, max_tokens, error, words):
    with pytest.raises(error, match=words):
        kvcache.plot.memory(caches, max_tokens)


# ---- all of them


def draw(ax=None):
    caches = {"f16": KVCache(1, 1, 128, None), "q8_0": KVCache(1, 1, 128, None, dtype="q8_0")}
    return kvcache.plot.memory(caches, 1000, ax)


def test_axes_that_are_given_are_drawn_into():
    given = new_axes()
    assert draw(given) is given
    assert len(draw().figure.axes) == len(given.figure.axes) == 1
    with pytest.raises(TypeError, match="ax=3: must be of type Axes"):
        draw(3)


def test_nothing_is_cut_off():
    """Not at a column's width either, and however long names are."""
    name = "a name that is far longer than the picture is wide, and what is said after that, and then some more words"
    for ax in (kvcache.plot.memory({name: KVCache(1, 1, 128, None)}, 1000, new_axes()), draw(), draw(new_axes())):
        ax.figure.draw_without_rendering()
        drawn, (width, height) = ax.figure.get_tightbbox(), ax.figure.get_size_inches()
        assert drawn.x0 > -0.02
        assert drawn.y0 > -0.02
        assert drawn.x1 < width + 0.02
        assert drawn.y1 < height + 0.02
        assert ax.get_position().height > 0.2


def test_pyplot_is_left_alone():
    """Without a display, and without a backend that anybody chose."""
    code = """
import sys, io, kvcache.plot, matplotlib
before = matplotlib.rcParams.copy()
ax = kvcache.plot.memory({"f32": kvcache.KVCache(1, 1, 1, None)}, 4)
for kind in ("png", "svg", "pdf"):
    ax.figure.savefig(io.BytesIO(), format=kind)
assert "matplotlib.pyplot" not in sys.modules
assert matplotlib.rcParams.copy() == before
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("MPLBACKEND", "DISPLAY")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_without_matplotlib():
    code = "import sys; sys.modules['matplotlib'] = sys.modules['matplotlib.axes'] = None; import kvcache, kvcache.plot"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        done.stderr.splitlines()[-1] == "ImportError: kvcache.plot draws with matplotlib: pip install 'kvcache[plot]'"
    )


def crossed(figure):
    """Return each pair of a name and a line that crosses it: another name's thin line, or one of the axes."""
    figure.draw_without_rendering()
    found = []
    for ax in figure.axes:
        paths = [("a line", line.get_transform().transform_path(line.get_path())) for line in ax.lines]
        arrows = [(text.get_text(), text.arrow_patch) for text in ax.texts]
        paths += [(name, arrow.get_transform().transform_path(arrow.get_path())) for name, arrow in arrows]
        for text in ax.texts:
            box = Text.get_window_extent(text)  # without its own thin line
            found += [(text.get_text(), name) for name, path in paths if path.intersects_bbox(box, filled=False)]
            edges = [ax.bbox.x1, *(other.bbox.x0 for other in figure.axes if other.bbox.x0 > ax.bbox.x1)]
            found += [(text.get_text(), "the axes") for edge in edges if box.x0 < edge < box.x1]
    return found


@pytest.mark.parametrize("dtypes", [("f16",), ("f16", "bf16"), ("f32", "f16", "q8_0", "q4_0"), DTYPES])
def test_no_line_crosses_a_name(dtypes):
    caches = {dtype: KVCache(32, 8, 128, None, dtype=dtype) for dtype in dtypes}
    figure = kvcache.plot.memory(caches, 131072).figure
    assert {text.get_text() for text in figure.axes[0].texts} == {*dtypes}
    assert crossed(figure) == []


@pytest.fixture(scope="module")
def pictures():
    spec = spec_from_file_location("pictures", Path(__file__).resolve().parents[2] / "docs/pictures.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["memory", "attention", "llama_cpp", "long_contexts"])
def test_no_line_crosses_a_name_in_the_documentation(pictures, name):
    figure = getattr(pictures, name)()
    assert all(len(axes.texts) == len(axes.lines) > 0 for axes in figure.axes)
    assert crossed(figure) == []


def test_names_stay_near_their_lines():
    heights = [0.0, 0.01, 0.02, 0.5, 0.9, 0.9]
    moved = kvcache.plot._apart(heights, 0.1)
    assert moved == pytest.approx([-0.09, 0.01, 0.11, 0.5, 0.85, 0.95])
    assert kvcache.plot._apart([], 0.1) == []
    assert kvcache.plot._apart([0.1, 0.2, 0.25], 0.1) == pytest.approx([0.0833, 0.1833, 0.2833], abs=1e-4)


@pytest.mark.slow
def test_pictures_of_the_documentation(pictures, tmp_path):
    path = Path(pictures.__file__)
    drawn = []
    for name in "ab":
        (tmp_path / name).mkdir()
        pictures.draw(tmp_path / name)
        drawn.append({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()})
    assert drawn[0] == drawn[1]
    names = ("visibility", "blocks", "memory", "attention", "llama_cpp", "long_contexts")
    assert set(drawn[0]) == {f"{name}.svg" for name in names}
    for name, data in drawn[0].items():
        assert ElementTree.fromstring(data).tag.endswith("svg")
        assert (path.parent / name).exists()
        assert len(data) < 100_000
