"""The benchmarks of the installed package return what they say; no test asserts a time."""

import dataclasses
import json
import sys
import textwrap

import pytest

import kvcache
from kvcache.layer import DTYPES
from kvcache.tools import bench, peers
from kvcache.tools.bench import Progress, Result, Shape

SMALL = Shape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, context=96, threads=1)

FAKE = """
    import os
    import numpy as np
    from kvcache.tools.peers.serve import Work, serve

    def set_up(task):
        if task.mode == "refuses":
            raise NotImplementedError("not this")
        if task.mode == "dies":
            os._exit(1)
        seconds = {"slow": 0.2, "fast": 0.1}[task.mode]
        return Work(lambda count: [seconds] * count, lambda: np.zeros((task.num_tokens, task.num_heads, task.head_dim)))

    serve(set_up)
"""


@pytest.fixture
def fake(tmp_path):
    """A function that makes a kind of peer which offers these modes and types for decoding."""
    program = tmp_path / "fake.py"
    program.write_text(textwrap.dedent(FAKE))

    class Fake(peers.PeerKind):
        def command(self):
            return [sys.executable, str(program)]

    return lambda *decode, **others: Fake("Fake", "", decode=decode, **others)


@pytest.fixture
def quick(monkeypatch):
    """Little memory, no more rounds than must be, and no other people's code."""
    monkeypatch.setattr(bench, "cache_size", lambda: 1 << 14)
    monkeypatch.setattr(bench, "PARTS", dict.fromkeys(bench.PARTS, 0.0))
    monkeypatch.setattr(bench, "READING", 0.0)
    monkeypatch.setattr(bench, "KINDS", {})
    return monkeypatch


def measured(shape=SMALL, **options):
    *said, result = bench.measure(shape, seconds=3600, **options)
    assert all(isinstance(one, Progress) for one in said)
    fractions = [one.fraction for one in said]
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] <= fractions[-1] < 1
    assert isinstance(result, Result)
    return result.record


def types(record, part, name="kvcache"):
    return [row["type"] for row in record["rows"] if row["part"] == part and row["name"].split(",")[0] == name]


# ---- everything


def test_every_type_in_every_part(quick):
    record = measured()
    assert json.loads(json.dumps(record)) == record
    assert all(types(record, part) == list(DTYPES) for part in ("decode", "prefill", "append"))
    assert len(record["rows"]) == 3 * len(DTYPES)
    assert record["left_out"] == []
    assert record["bandwidth"] > 0
    assert record["shape"] == dataclasses.asdict(SMALL)
    assert record["machine"]["kvcache"]
    for row in record["rows"]:
        tokens = 96 if row["part"] == "prefill" else 1
        assert row["tokens_per_second"] == pytest.approx(tokens / (2 * row["seconds"]))
        decodes = row["part"] == "decode"
        assert ("bytes_per_second" in row) == ("of_bandwidth" in row) == ("over_f16" in row) == decodes
        assert row["type"] != "f16" or not decodes or row["over_f16"] == 1


def test_short_heads_beside_those_of_128(quick):
    record = measured(dataclasses.replace(SMALL, head_dim=128))
    assert types(record, "decode x 64") == types(record, "decode") == list(DTYPES)
    rates = {
        part: {row["type"]: row["bytes_per_second"] * row["seconds"] for row in record["rows"] if row["part"] == part}
        for part in ("decode", "decode x 64")
    }
    for dtype in DTYPES:
        for part, dim in (("decode", 128), ("decode x 64", 64)):
            nbytes = 96 * dataclasses.replace(SMALL, head_dim=dim).token_bytes(dtype)
            assert rates[part][dtype] == pytest.approx(nbytes)


def test_peers(quick, fake):
    kind = fake(("slow", "f16"), ("fast", "bf16"), ("slow", "int8"), ("fast", "f32"), append=(("fast", "f16"),))
    quick.setattr(bench, "KINDS", {"fake": kind})
    record = measured()
    assert types(record, "decode", "Fake") == ["bf16", "int8"]  # the best of each width, and no other widths
    assert types(record, "append", "Fake") == ["f16"]
    assert types(record, "prefill", "Fake") == []
    assert all(("by_ours" in row) == (row["name"] != "kvcache") for row in record["rows"])
    row = next(row for row in record["rows"] if row["type"] == "int8" and row["name"] != "kvcache")
    assert (row["name"], row["seconds"]) == ("Fake, slow", pytest.approx(0.2))
    assert measured(peers=False)["left_out"] == []


def test_peers_that_cannot(quick, fake):
    kind = fake(("refuses", "f16"), ("fast", "bf16"), ("dies", "int8"), prefill=(("fast", "f16"),))
    missing = peers.PeerKind("Missing", "look for it", decode=(), needs=("no_such_module_anywhere",))
    quick.setattr(bench, "KINDS", {"fake": kind, "missing": missing})
    record = measured()
    assert types(record, "decode", "Fake") == []  # what had been set up ended with the process
    assert types(record, "prefill", "Fake") == ["f16"]
    assert record["left_out"] == [
        "Missing is not installed: look for it",
        "Fake f16 refuses at 96 tokens: NotImplementedError('not this')",
        "Fake int8 dies at 96 tokens: it ended",
    ]


def test_no_time_for_peers(quick, fake):
    quick.setattr(bench, "KINDS", {"fake": fake(("fast", "f16"))})
    *_, result = bench.measure(SMALL, seconds=0)
    assert result.record["left_out"] == ["Fake: no time was left"]


def test_types_that_do_not_fit_are_left_out(quick, fake):
    quick.setattr(bench, "KINDS", {"fake": fake(("fast", "int8"))})
    record = measured(dataclasses.replace(SMALL, head_dim=48))
    assert types(record, "decode") == ["f32", "f16", "bf16"]
    assert types(record, "decode", "Fake") == ["int8"]  # by our f16, then
    assert record["left_out"] == [
        f"{dtype} takes a head_dim that is a multiple of 32, not 48"
        for dtype in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "int8", "int6", "int4")
    ]


def test_types_whose_matrix_does_not_fit_are_left_out(quick, fake):
    quick.setattr(bench, "KINDS", {"fake": fake(("fast", "f16"))})
    record = measured(dataclasses.replace(SMALL, num_kv_heads=1, head_dim=128, v_head_dim=96, value_in_key=True))
    assert types(record, "decode") == ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "int8"]
    assert record["left_out"][:2] == [
        f"{dtype} takes a v_head_dim that is a multiple of 128, not 96, in keys of 128" for dtype in ("int6", "int4")
    ]


def test_other_shapes(quick, fake):
    quick.setattr(bench, "KINDS", {"fake": fake(("fast", "f16"))})
    latent = dataclasses.replace(SMALL, num_kv_heads=1, head_dim=96, v_head_dim=64, value_in_key=True)
    record = measured(latent)
    assert types(record, "prefill") == list(DTYPES)
    assert types(record, "decode", "Fake") == []
    assert len(record["left_out"]) == 1
    assert latent.token_bytes("f16") == 192
    assert types(measured(dataclasses.replace(SMALL, context=1)), "decode") == list(DTYPES)


@pytest.mark.parametrize("rounds", [1, 4, 12])
def test_memory_is_given_back(quick, fake, rounds):
    psutil = pytest.importorskip("psutil")
    quick.setattr(bench, "cache_size", lambda: 8 << 20)
    quick.setattr(bench, "KINDS", {"fake": fake(("fast", "f16"))})
    process = psutil.Process()
    before, children = process.memory_info().rss, process.children()  # which may build programs in C
    running = bench.measure(SMALL, seconds=3600)
    for _ in range(rounds):
        next(running)
    running.close()
    assert not {*process.children()} - {*children}
    assert process.memory_info().rss - before < 24 << 20  # less than any of what it filled


# ---- for predictions, and bandwidth


def test_decode_rates(quick):
    rates = bench.decode_rates(SMALL, seconds=0)
    assert list(rates) == list(DTYPES)
    assert all(rate > 0 for rate in rates.values())
    assert list(bench.decode_rates(SMALL, ["q8_0"], seconds=0)) == ["q8_0"]
    assert list(bench.decode_rates(dataclasses.replace(SMALL, head_dim=80), seconds=0)) == ["f32", "f16", "bf16"]
    assert bench.decode_rates(dataclasses.replace(SMALL, head_dim=80), ["q4_0"], seconds=0) == {}


def test_index_keys_are_read_to_choose_rows(quick, monkeypatch):
    shape = dataclasses.replace(SMALL, num_kv_heads=1, v_head_dim=0)
    chosen, choose = [], kvcache.Batch.choose
    monkeypatch.setattr(
        kvcache.Batch, "choose", lambda *given, **more: chosen.append(more["width"]) or choose(*given, **more)
    )
    assert shape.token_bytes("f16") == 2 * shape.head_dim
    assert bench.decode_rates(shape, ["f16", "int8"], seconds=0).keys() == {"f16", "int8"}
    assert {*chosen} == {shape.context}


def test_select_rates(quick, monkeypatch):
    monkeypatch.setattr(bench, "SELECT_TOKENS", 200)
    asked = []
    attend = kvcache.Batch.attend
    monkeypatch.setattr(
        kvcache.Batch, "attend", lambda *given, **more: asked.append(more["select"]) or attend(*given, **more)
    )
    shape = dataclasses.replace(SMALL, context=1 << 20)
    rates = bench.select_rates(shape, 40, ["f16", "int8"], seconds=0)
    assert set(asked) == {40, 10}
    assert list(rates) == ["f16", "int8"]
    assert all(min(dataclasses.astuple(rate)) > 0 for rate in rates.values())
    assert bench.select_rates(dataclasses.replace(SMALL, head_dim=80), 40, ["q4_0"], seconds=0) == {}
    with pytest.raises(ValueError, match="'f8'"):
        bench.select_rates(SMALL, 40, ["f8"])


@pytest.mark.parametrize("threads", [1, 3])
def test_read_bandwidth(threads):
    assert bench.read_bandwidth(1000, threads, seconds=0) > 0


def test_a_short_context_takes_no_more_memory_than_a_long_one(quick):
    quick.setattr(bench, "available_memory", lambda: (1 << 30, "of this test"))
    short, long = (bench._Run(dataclasses.replace(SMALL, context=n), 1, False) for n in (1, 1000))
    assert short.working_set == long.working_set == 4 << 14
    for run in short, long:
        with bench._Filled(run.shape, "f16", run.working_set) as filled:
            assert 4 << 14 <= filled._cache.nbytes < 5 << 16


# ---- bad arguments


def test_a_context_that_no_machine_holds(quick):
    quick.setattr(bench, "available_memory", lambda: (1 << 20, "of this test"))
    with pytest.raises(MemoryError, match=r"^context=9000: a layer in each of 12 types takes .*, and 1.0 MiB are free"):
        next(bench.measure(dataclasses.replace(SMALL, context=9000)))


@pytest.mark.parametrize(
    "name", ["num_layers", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "context", "threads"]
)
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (1 << 40, ValueError), (2.5, TypeError)]
)
def test_bad_shapes(name, value, error):
    if name == "v_head_dim" and value == 0:
        pytest.skip("0: index keys alone")
    with pytest.raises(error, match=name):
        dataclasses.replace(SMALL, **{name: value})


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_heads=4: must be a multiple of num_kv_heads, 3"):
        dataclasses.replace(SMALL, num_kv_heads=3)
    with pytest.raises(ValueError, match="dtypes holds 'f8'"):
        bench.decode_rates(SMALL, ["f16", "f8"])
    with pytest.raises(ValueError, match="nbytes"):
        bench.read_bandwidth(0)
    with pytest.raises(ValueError, match="threads"):
        bench.read_bandwidth(1000, 0)


# ---- peers that are installed, torch among them


@pytest.mark.parametrize("key", peers.KINDS)
def test_installed_peers_are_right(key):
    kind = peers.KINDS[key]
    if not kind.command():
        pytest.skip(f"needs {' and '.join(kind.needs)}")
    refused = []
    numbers = {"threads": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "context": 64, "working_set": 1 << 16}
    with peers.Peers({key: kind}, refused.append) as there:
        for offers, num_tokens in ((kind.decode, 1), (kind.prefill, 16)):
            asked = list(peers.tasks(offers, num_tokens=num_tokens, **numbers))
            for entrant, task in zip(there.set_up((key, task) for task in asked), asked, strict=True):
                assert len(entrant.run(3)) == 3
                assert entrant.error() < (1e-5 if task.type == "f32" else 0.5 if task.type == "int4" else 0.15)
    assert refused == []


# ---- pictures


def test_picture(quick, fake):
    pytest.importorskip("matplotlib")
    quick.setattr(bench, "KINDS", {"fake": fake(("fast", "f16"))})
    figure = bench.picture(measured())
    assert [axes.get_title(loc="left").split(",")[0] for axes in figure.axes] == ["decode", "prefill", "append"]
    assert [len(axes.patches) for axes in figure.axes] == [13, 12, 12]
