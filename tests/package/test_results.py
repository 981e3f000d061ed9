"""The table of docs/performance.md is what bench/write_results.py makes of the figures kept."""

import json
from importlib import import_module
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return import_module("write_results")


def test_the_table_is_made_of_what_was_kept(results):
    text = results.PERFORMANCE.read_text()
    assert text == results.with_speedups(text), "run python bench/write_results.py"


def test_each_kept_figure_stands_once(results):
    assert {path.stem for path in results.RESULTS.glob("*.csv")} == {*results.processors(), "processors"}
    for name in results.processors():
        rows = results.read(results.RESULTS / f"{name}.csv")
        assert len({results.key_of(row) for row in rows}) == len(rows)
        for row in rows:
            assert {*results.RUN, "section", "name"} <= set(row) <= set(results.COLUMNS)
            assert {"quotient", "seconds", "rate", "value"} & set(row)


def test_a_run_is_added(results, tmp_path, monkeypatch, capsys):
    common = {"section": "peers", "context": 8192, "threads": 8, "type": "f16"}
    speedup = common | {"name": "speedup over ggml's fastest path", "low": 3.0}
    put = {"section": "put", "name": "a put", "type": "", "value": "80 ms, twice"}
    run = {
        "command": "python bench/bench_attention.py --only peers", "seen": "2026-11-22", "commit": "0123456",
        "machine": "A processor, 8 cores",
        "rows": [common | {"name": "kvcache", "seconds": 1e-3}, speedup | {"quotient": 3.14159265}, put],
    }  # fmt: skip
    (tmp_path / "processors.csv").write_text("file,processor,notes\nz,Another,\n")
    (tmp_path / "z.csv").write_text("section\n")
    (tmp_path / "performance.md").write_text("# P\n<!-- speedups -->\n<!-- end of speedups -->\n")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "PERFORMANCE", tmp_path / "performance.md")
    source = tmp_path / "run"

    source.write_text(json.dumps(run))
    results.main(["--keep", str(source), "--as", "a-processor"])
    assert capsys.readouterr() == ("", "performance.md\n")
    assert results.processors() == {"a-processor": "A processor, 8 cores", "z": "Another"}
    rows = results.read(tmp_path / "a-processor.csv")
    assert rows[1] == {
        **{"seen": "2026-11-22", "commit": "0123456", "command": run["command"]},
        **common, "name": speedup["name"], "quotient": 3.1416,
    }  # fmt: skip
    assert (rows[2]["value"], len(rows)) == ("80 ms, twice", 3)
    table = (tmp_path / "performance.md").read_text()
    assert "| [A processor, 8 cores](../bench/results/a-processor.csv) | 8 |  |  | 3.14 |" in table

    again = [speedup | {"quotient": 2.5}, speedup | {"quotient": 9.0}]
    source.write_text(json.dumps(run | {"seen": "2026-11-23", "rows": again}))
    results.main(["--keep", str(source), "--as", "a-processor"])
    rows = results.read(tmp_path / "a-processor.csv")
    assert [(row["seen"], row.get("quotient")) for row in rows] == [
        ("2026-11-22", None), ("2026-11-22", None), ("2026-11-23", 2.5)
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        results.main(["--keep", str(source)])


def test_a_command_is_kept_without_the_files_that_it_writes(results, tmp_path):
    command = "python bench/bench_attention.py --only peers{} --dtype f16"
    written = tmp_path / "run.json"
    import_module("figures").keep(written, command.format(f" --json {written} --plot={tmp_path}/p.svg"), [])
    assert json.loads(written.read_text())["command"] == command.format("")


@pytest.mark.parametrize(("value", "text"), [(2.0, "2.0"), (0.6, "0.6"), (1.276, "1.28"), (23, "23")])
def test_numbers(results, value, text):
    assert results.number(value) == text
