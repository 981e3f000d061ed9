"""What a run says while it measures."""

import io
from pathlib import Path

import pytest

from kvcache import ModelFileError, runner
from kvcache.layer import DTYPES
from kvcache.runner import stream

MODEL = Path(__file__).resolve().parents[2] / "examples/model"
ASKED = "(measuring 4 steps without the cache, then 12 types on 4 texts of 2,048 tokens; Ctrl-C ends it)\n"


class Watched(io.StringIO):
    """What was written, and what of it was flushed: a pipe is sent no more."""

    flushed = ""

    def flush(self):
        self.flushed = self.getvalue()


@pytest.fixture
def out():
    return Watched()


@pytest.fixture
def measured(monkeypatch, out, capsys):
    """Replaces what takes long; returns what the user had been shown when each of it began.

    An interrupt comes once that is as much as `interrupted` says.
    """

    class Shown(list):
        interrupted = None

    shown = Shown()

    def see():
        if len(shown) == shown.interrupted:
            raise KeyboardInterrupt
        shown.append((out.flushed, capsys.readouterr().err))

    def seconds_without_cache(model, options, tokens, lengths):
        see()
        return [0.5] * len(lengths)

    def compare_dtypes(model, options, windows):
        for dtype in DTYPES:
            see()
            yield dtype, runner.Fidelity(*((1.0, 0, 0, 1) if dtype == "f32" else (1.25, 1.5e-5, 0.00075, 0.987654)))
        see()

    monkeypatch.setattr(stream, "seconds_without_cache", seconds_without_cache)
    monkeypatch.setattr(stream, "compare_dtypes", compare_dtypes)
    return shown


def test_it_says_what_it_measures_and_shows_each_row_at_once(out, measured):
    assert runner.run(MODEL, b"ROMEO:", runner.Options(max_new_tokens=5, compare=True), out) == 0
    (before, asked), *rows = measured
    assert asked == ASKED
    assert [line.split(",")[0] for line in before.splitlines()[-2:]] == ["prefill", "decode"]
    assert rows[0][0].splitlines()[-1].startswith("decode, without cache")
    for dtype, (found, errors) in zip(DTYPES, rows[1:], strict=True):
        assert found.splitlines()[-1].startswith(f"{dtype} ")
        assert errors == ""
    table = out.getvalue().split("\n\n")[-1].splitlines()
    heading = "cache type bytes/token loss change divergence 99.9 % best kept"
    assert table[0].split() == heading.split()
    assert [line.split()[0] for line in table[1:]] == [*DTYPES]
    assert table[1].split()[1:] == ["4,096", "1.000000", "-", "-", "-", "-"]
    assert table[-1].split()[1:] == ["544", "1.250000", "+0.250000", "1.50e-05", "7.50e-04", "98.77%"]


def test_its_table_fits_a_terminal(out, measured, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert runner.run(MODEL, b"ROMEO:", runner.Options(max_new_tokens=5, transform="hadamard", compare=True), out) == 0
    table = out.getvalue().split("\n\n")[-1].splitlines()
    assert len(table) == 1 + len(DTYPES)
    assert {len(line) for line in table} == {77}
    assert all(line[14] != " " and line[15] == " " for line in table if line.startswith("hadamard iq4_nl"))


@pytest.mark.parametrize("asked", [{}, {"compare": True, "quiet": True}])
def test_it_measures_nothing_unasked(out, measured, asked):
    assert runner.run(MODEL, b"ROMEO:", runner.Options(max_new_tokens=5, **asked), out) == 0
    assert measured == []


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_an_interrupt_keeps_what_was_measured(out, measured, after):
    measured.interrupted = after
    assert runner.run(MODEL, b"ROMEO:", runner.Options(max_new_tokens=5, compare=True), out) == 130
    *_, speeds, types = out.getvalue().split("\n\n")
    assert ("without cache" in speeds) is (after > 0)
    names = [line.split()[0] for line in types.splitlines()]
    assert names == ["cache", *(DTYPES[: after - 1] if after > 1 else DTYPES)]
    assert ("divergence" in types) is (after > 1)


def test_a_folder_without_a_text_to_compare_on(tmp_path, out, measured, capsys):
    for file in MODEL.iterdir():
        if file.name != "eval.txt":
            (tmp_path / file.name).symlink_to(file)
    assert runner.run(tmp_path, b"ROMEO:", runner.Options(max_new_tokens=5, compare=True), out) == 0
    [(_, errors)] = measured
    assert errors == f"({tmp_path} has no eval.txt to compare the types on)\n(measuring 4 steps without the cache; " \
        "Ctrl-C ends it)\n"  # fmt: skip
    assert (
        runner.run(tmp_path, b"ROMEO:", runner.Options(max_new_tokens=1, compare=True), out) == 0
    )  # no step to repeat
    assert capsys.readouterr().err == f"({tmp_path} has no eval.txt to compare the types on)\n"


def test_a_text_to_compare_on_is_looked_at_before_the_text(tmp_path, out, measured, capsys):
    for file in MODEL.iterdir():
        if file.name != "eval.txt":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "eval.txt").mkdir()
    with pytest.raises(ModelFileError, match=r"eval\.txt is not a file"):
        runner.run(tmp_path, b"ROMEO:", runner.Options(max_new_tokens=1, compare=True), out)
    assert out.getvalue() == ""
    (tmp_path / "eval.txt").rmdir()
    (tmp_path / "eval.txt").write_text("")
    assert runner.run(tmp_path, b"ROMEO:", runner.Options(max_new_tokens=1, compare=True), out) == 0
    assert capsys.readouterr().err == f"({tmp_path} has an empty eval.txt to compare the types on)\n"
