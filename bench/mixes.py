"""Time mixes of instructions that wait for nothing: what this machine's ports, loads and issue width let through.

A mix is how many of each kind of instruction one row takes. It is compiled as a loop of straight-line code in which
the kinds are evenly spread, no instruction waits for another, and all loads hit the L1 cache. Measuring it takes the
place of a table of processors: a virtual machine may hide which one it has, and tables disagree. (LLVM 14's put
conversions of 512 bits on a port that is closed while vectors are that wide, and give Zen 3 one multiply-add a cycle.)
"""

from __future__ import annotations

import ctypes
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compiling import build, function

Mix = Counter[str]

LENGTH = 400  # instructions of a loop, about: a row or more, and few enough for a cache of decoded instructions
LOOPS = 25  # of one measurement, some microseconds


@dataclass(frozen=True)
class Vectors:
    """A set of vector instructions: assembler of each kind, with {sum}, {to}, {x} and {y} as registers, %[p] as memory.

    A kind may take two instructions. What adds to its target has `sums` registers to go round, more than its latency
    needs; what only writes one has four.
    """

    lanes: int
    accumulators: int  # registers that kernels keep sums in: ACCUMULATORS of template.h
    register: str
    sums: int
    asm: dict[str, str]
    clear: str  # sets {to} to 0: numbers that are none, or denormal, would be slow
    chain: str  # two instructions, of which each waits for the one before
    chain_cycles: int  # what they take

    def text(self, asm: str, i: int) -> str:
        """Return the assembler of the i-th instruction of a loop; n and m are the numbers of `to` and x."""
        n, m = self.sums + i % 4, self.sums + 4
        numbers = {"sum": i % self.sums, "to": n, "x": m, "y": m + 1}
        return asm.format(n=n, m=m, **{name: self.register.format(number) for name, number in numbers.items()})

    def loop(self, mix: Mix) -> tuple[int, list[str]]:
        """Return a number of rows and the instructions they take, each kind evenly spread."""
        rows = max(1, round(LENGTH / mix.total()))
        placed = []
        for kind, count in mix.items():
            num = round(count * rows)
            placed += [((i + 0.5) / num, self.text(self.asm[kind], i)) for i in range(num)]
        return rows, [text for _, text in sorted(placed)]


X86 = {"load": "vmovups (%[p]), {to}", "broadcast": "vbroadcastss (%[p]), {to}", "store": "vmovups {x}, 64(%[p])"}
X86 |= {"prefetch": "prefetcht1 (%[p])", "any": "nop", "product": "vfmadd231ps {x}, {y}, {sum}"}
X86 |= {"add": "vaddps {x}, {y}, {to}", "shuffle": "vpunpckldq {x}, {y}, {to}", "from int": "vcvtdq2ps {x}, {to}"}
X86 |= {"from f16": "vcvtph2ps (%[p]), {to}", "shift": "vpslld $16, {x}, {to}"}
X86 |= {"pairs": "vpmaddwd {x}, {y}, {to}\n vpaddd {x}, {y}, {to}"}
MULTIPLICATIONS = "imul %[x], %[x]\n imul %[x], %[x]"  # of integers: processors do not merge them, as they do additions

AVX512 = Vectors(
    16, 16, "%%zmm{}", 16,
    X86 | {
        "logic": "vpandd {x}, {y}, {to}", "insert": "vinserti32x4 $1, (%[p]), {y}, {to}",
        "compare": "vcmpps $5, {x}, {y}, %%k2",
    },
    "vpxord {to}, {to}, {to}", MULTIPLICATIONS, 6,
)  # fmt: skip
VNNI = {"pairs": "vpdpwssd {x}, {y}, {sum}", "quads": "vpdpbusd {x}, {y}, {sum}"}
BF16 = {"bf16 pairs": "vdpbf16ps {x}, {y}, {sum}"}
AVX2 = Vectors(
    8, 12, "%%ymm{}", 10,
    X86 | {
        "logic": "vpand {x}, {y}, {to}", "insert": "vinserti128 $1, (%[p]), {y}, {to}",
        "compare": "vcmpps $13, {x}, {y}, {to}\n vandps {x}, {y}, {to}",
    },
    "vpxor {to}, {to}, {to}", MULTIPLICATIONS, 6,
)  # fmt: skip
NEON = Vectors(
    4, 16, "v{}", 16,
    {
        "load": "ldr q{n}, [%[p]]", "broadcast": "ld1r {{{to}.4s}}, [%[p]]", "store": "str q{m}, [%[p], 64]",
        "prefetch": "prfm pldl2keep, [%[p]]", "any": "nop", "product": "fmla {sum}.4s, {x}.4s, {y}.4s",
        "add": "fadd {to}.4s, {x}.4s, {y}.4s", "add pairs": "faddp {to}.4s, {x}.4s, {y}.4s",
        "shuffle": "zip1 {to}.4s, {x}.4s, {y}.4s", "from int": "scvtf {to}.4s, {x}.4s",
        "from f16": "ldr d{n}, [%[p]]\n fcvtl {to}.4s, {x}.4h", "logic": "and {to}.16b, {x}.16b, {y}.16b",
        "shift": "shl {to}.4s, {x}.4s, 16", "insert": "ld1 {{{to}.s}}[1], [%[p]]",
        "compare": "fcmge {to}.4s, {x}.4s, {y}.4s\n and {to}.16b, {x}.16b, {y}.16b",
        "pairs": "smlal {sum}.4s, {x}.4h, {y}.4h\n smlal2 {sum}.4s, {x}.8h, {y}.8h",
    },
    "movi {to}.4s, 0", "add %[x], %[x], %[x]\n eor %[x], %[x], %[p]", 2,
)  # fmt: skip


def vectors_of(isa: str) -> Vectors | None:
    """Return the instructions of a set of kernels, by its name; None for one that is not listed."""
    if isa in ("avx2", "neon"):
        return AVX2 if isa == "avx2" else NEON
    more = {"avx512": {}, "avx512vnni": VNNI, "avx512bf16": VNNI | BF16, "amx": VNNI | BF16, "amxfp16": VNNI | BF16}
    return Vectors(**{**vars(AVX512), "asm": AVX512.asm | more[isa]}) if isa in more else None


# ---- compiling and timing them

SOURCE = """
#define _GNU_SOURCE
#include <time.h>
static double now(void) {{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}}
{functions}
static void (*const mixes[])(char *, long) = {{{names}}};
double mixes_seconds(int i, long loops) {{
    static char memory[4096] __attribute__((aligned(64)));
    const double start = now();
    mixes[i](memory, loops);
    return now() - start;
}}
double mixes_chain(long loops) {{
    long x = 1;
    const double start = now();
    for (long i = 0; i < loops; i++) __asm__ volatile("{chain}" : [x] "+r"(x) : [p] "r"(loops));
    return now() - start;
}}
"""
FUNCTION = """
static void mix_{i}(char *p, long loops) {{
    __asm__ volatile("{clear}" ::: {registers});
    for (; loops; loops--) __asm__ volatile("{text}" : : [p] "r"(p) : "memory", {registers});
    __asm__ volatile("{end}");
}}
"""


def source(vectors: Vectors, loops: Sequence[Sequence[str]]) -> str:
    """Return C with a function for each loop."""
    is_x86 = vectors.lanes > 4
    clobbered = [f"xmm{i}" if is_x86 else f"v{i}" for i in range(16 if is_x86 else 32)]
    each = [vectors.register.format(i) for i in range(vectors.sums + 6)]
    shared = {
        "registers": ", ".join(f'"{name}"' for name in clobbered),
        "clear": "\\n".join(vectors.clear.format(to=register) for register in each),
        "end": "vzeroupper" if is_x86 else "",
    }
    functions = [FUNCTION.format(i=i, text=_joined(loop), **shared) for i, loop in enumerate(loops)]
    chain = _joined([vectors.chain] * 4)
    names = ", ".join(f"mix_{i}" for i in range(len(loops)))
    return SOURCE.format(functions="".join(functions), names=names, chain=chain)


def _joined(lines: Sequence[str]) -> str:
    return "\\n".join(line.replace("\n", "\\n") for line in lines)


class Mixes:
    """Compiled mixes, by their number."""

    def __init__(self, vectors: Vectors, mixes: Sequence[Mix]) -> None:
        loops = [vectors.loop(mix) for mix in mixes]
        self._rows = [rows for rows, _ in loops]
        self._chain_cycles = 4 * vectors.chain_cycles
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "mixes.c"
            path.write_text(source(vectors, [texts for _, texts in loops]))
            library = build("mixes", [path])
        self._seconds = function(library, "mixes_seconds", ctypes.c_double, ctypes.c_int, ctypes.c_long)
        self._chain = function(library, "mixes_chain", ctypes.c_double, ctypes.c_long)

    def seconds(self, i: int, reps: int = 20) -> float:
        """Return the least seconds that mix i takes for a row, of some repetitions."""
        return min(self._seconds(i, LOOPS) for _ in range(reps)) / LOOPS / self._rows[i]

    def cycle(self, reps: int = 20) -> float:
        """Return the seconds of a clock cycle now, by instructions that wait for each other."""
        return min(self._chain(500) for _ in range(reps)) / 500 / self._chain_cycles
