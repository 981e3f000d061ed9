"""Run each program once, at sizes at which its figures mean nothing (bench_attention.py: test_attention.py)."""

import importlib

import pytest

COMMANDS = [
    "bench_busy --context 64 --threads 1 --seconds 0 --torch",
    "bench_choose --context 4096 --dtype int8 --rounds 2",
    "bench_connections --rounds 1 --idle 9 --half 4 --slow 2 --long 20 --clients 2 --times 1 --new 4",
    "bench_hf --context 64 --steps 2 --dtype bf16",
    "bench_hf --model hybrid --context 64 --steps 1 --dtype bf16",
    "bench_hf --model hybrid --only prompt --context 64 --steps 1 --dtype bf16",
    "bench_hf --model hybrid --only resume --context 200 --steps 1 --dtype bf16",
    "bench_pages --types f16 --heads 64 --tokens 1000 --layers 2",
    "bench_prefix --only calls --seconds 0",
    "bench_select --tokens 8192 --types f16 --threads 1 --rounds 2",
    "bench_sparse --models minimax_m3 --types int8 --tokens 4096 --rounds 1",
    "bench_sparse --tokens 4096 --recall",
    "bench_serving --tokens 64 --clients 2 --turns 1 --own 4 --new 4 --rounds 1 --dtype bf16",
    "bench_state --tokens 256 --layers 2 --rounds 1",
    "bench_stores --size 64KiB --seconds 0",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_it_runs(command, monkeypatch, capsys):
    name, *words = command.split()
    if name in ("bench_hf", "bench_busy", "bench_connections", "bench_serving"):
        pytest.importorskip("torch")
    monkeypatch.setattr("sys.argv", [name, *words])
    importlib.import_module(name).main()
    assert len(capsys.readouterr().out.splitlines()) > 1
