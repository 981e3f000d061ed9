"""The table of docs/performance.md is what bench/write_results.py makes of the figures kept; it prints all others."""

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
    assert text == results.with_speedups(text, results.load()), "run python bench/write_results.py"


def test_kept_files_are_written_as_they_are_kept(results):
    for path in results.RESULTS.glob("*.json"):
        assert path.read_text() == results.text_of(json.loads(path.read_text()))


def test_lines_have_a_name_and_a_figure(results):
    for record in results.load().values():
        for run in record["runs"]:
            assert {"command", "seen", "commit", "lines"} <= set(run)
            assert run["lines"][0]["section"] in results.SECTIONS
            for line in run["lines"]:
                assert line["name"]
                assert {"quotient", "seconds", "rate", "value"} & set(line)


def test_a_run_is_added(results, tmp_path, monkeypatch, capsys):
    run = {
        "command": "python bench/bench_attention.py --only peers", "seen": "2026-11-22", "commit": "0123456",
        "machine": "A processor, 8 cores", "rows": [
            {"section": "peers", "name": "kvcache", "type": "f16", "context": 8192, "threads": 8, "seconds": 1e-3},
            {"section": "peers", "name": "speedup over ggml's fastest path", "type": "f16", "context": 8192,
             "threads": 8, "quotient": 3.14159},
        ],
    }  # fmt: skip
    source = tmp_path / "run"
    source.write_text(json.dumps(run))
    (tmp_path / "performance.md").write_text("# P\n<!-- speedups -->\n<!-- end of speedups -->\n")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "PERFORMANCE", tmp_path / "performance.md")
    results.main(["--keep", str(source), "--as", "a-processor"])
    results.main(["a-processor"])
    page = capsys.readouterr().out
    assert "# A processor, 8 cores\n" in page
    assert "2026-11-22, measured at commit 0123456" in page
    assert "| speedup over ggml's fastest path | 8,192 | 8 | 3.14 |" in page
    assert "| kvcache | 8,192 | 8 | 1,000 |" in page
    table = (tmp_path / "performance.md").read_text()
    assert "| [A processor, 8 cores](../bench/results/a-processor.json) | 8 |  |  | 3.14 |" in table
    results.main(["--keep", str(source), "--as", "a-processor"])
    assert len(results.load()["a-processor"]["runs"]) == 2
    assert capsys.readouterr() == ("", "performance.md\n")
    with pytest.raises(SystemExit):
        results.main(["another"])
    assert "there is no 'another': give some of a-processor" in capsys.readouterr().err


def test_lines_hold_the_rows_that_differ_in_type_alone(results):
    common = {"section": "floor", "name": "a kernel", "context": 8192, "threads": 1}
    rows = [
        {**common, "type": "f16", "quotient": 1.5, "bound": "memory", "seconds": 0.25},
        {**common, "type": "q8_0", "quotient": 2.0},
        {"section": "put", "name": "an import", "type": "", "value": "80 ms"},
    ]
    again = {**common, "type": "q8_0", "quotient": 3.0}
    lines = results.lines_of([*rows, again])
    assert len(lines) == 2
    assert results.rows_of(lines) == rows


def test_a_command_is_kept_without_the_files_that_it_writes(results, tmp_path):
    command = "python bench/bench_attention.py --only peers{} --dtype f16"
    written = tmp_path / "run.json"
    import_module("figures").keep(written, command.format(f" --json {written} --plot={tmp_path}/p.svg"), [])
    assert json.loads(written.read_text())["command"] == command.format("")


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.0, "2.0"), (0.6, "0.6"), (1.276, "1.28"), (23, "23"), (5.7e-7, "5.7e-7"), (16680.4, "16,680")],
)
def test_numbers(results, value, text):
    assert results.number(value) == text
