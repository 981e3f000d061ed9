"""Change the code of src/ in one place at a time, and see whether a program in C notices: mutation testing.

    python tests/support/mutate.py --seed 1 --number 200 [folder]    # keeps what it builds and measures in the folder

The seed draws changes. Each is tried in a core of its own, with the quick part of the tests. First run the programs of
coverage.py that run the changed line, the fastest first, and then some seeds of the simulation (drive_scheduler).
Prints the changes that all of them pass, and fails if fewer than LEAST are noticed. Changes that do not compile, or
compile to the same code, do not count. Changes that give the same by a rule of syntax, same_in(), or are listed in
same_changes.txt, are not tried. Kernels are left out: instruction sets are compared with each other.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["KVCACHE_TEST_PART"] = "quick"  # of each program
from support.c_sources import amalgamate, blank
from support.compiling import (
    ENVIRONMENT,
    FLAGS,
    LIBRARIES,
    OPENMP,
    ROOT,
    compile_all,
    compile_core,
    compiler,
    divert,
    diverted_by,
    run,
)
from support.coverage import COUNTING, PROGRAMS, read_counts
from world.test_world import build_simulated

LEAST = 90.0  # percent
MEMORY = 8 << 30  # bytes that a program may map
SIMULATED = ["--seed", "1", "--runs", "20"]
LISTED = Path(__file__).with_name("same_changes.txt")
ENTRY = re.compile(r"# .+\n(.+)\n- (.+)\n\+ (.+)")

# ---- changes

OTHER = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&"}
OTHER |= {"+": "-", "-": "+", "+=": "-=", "-=": "+="}
OPERATOR = re.compile(r"(?<=\s)[<>=!&|+-]{1,2}(?=\s)")
NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
IF = re.compile(r"\bif (?=\()")
FUNCTION = re.compile(r"^(\w[^;{}=]*\)) \{(?:\n(.*?)^\}|([^\n]*)\}$)", re.M | re.S)
HEADER = re.compile(r"(?:if|for|while|switch) (?=\()")
LABEL = re.compile(r"(?:else|do)\b|case [^:]*:|\w+:")
CALL = re.compile(r"\w+\(.*\)", re.S)
ASSIGNMENT = re.compile(r"\**\w+(?:(?:->|\.)\w+|\[[^;=]*?\])*(?: (?:[-+*/|&^%]|<<|>>)?= .*|\+\+|--)", re.S)

# Changes without effect: code that matches "same" is not changed.
VALUE = r"(?:->|[^<>=?:;&|!,{}])+?"
BEGIN = r"(?:(?<=\()|(?<=[=?:,] )|(?<=&& )|(?<=\|\| )|(?<=return ))"
BOUND = rf"(?P<a>{VALUE}) (?P<same>[<>]=?) (?P<b>{VALUE})"
EITHER = r"(?:(?P=a){0}(?P=b)|(?P=b){0}(?P=a))"
SAME = [
    # Either of two equal values may be taken.
    re.compile(rf"\bif \({BOUND}\) {EITHER.format(' = ')};"),
    re.compile(rf"{BEGIN}{BOUND}(?: && [^?;]+)? \? (?:\(\w+\))?{EITHER.format(' : ')}(?=[;,)])"),
    # Waiting and prefetching change times alone.
    re.compile(r"(?P<same>\b(?:kvc_pause|kvc_prefetch\w*|__builtin_prefetch)\([^;]*\))(?=;)"),
    # A way that is rare elsewhere is as right with another number, and the simulation's alone.
    re.compile(r"KVC_BUGGIFY\(\) \? (?P<same>\d+)"),
]
YES = re.compile(r"\breturn (?P<same>1);")
SET = re.compile(r"\b(?P<name>\w+) = (?P<same>1);")
# How a flag is used: declared, set, or asked whether it is 0; and a function that says yes or no.
PATH = r"[\w>.\[\]-]*"
FLAG_USE = "|".join(
    [
        r"\bint(?:\d+_t)? (?:\w+, )*NAME\b",
        r"\bNAME = ",
        rf"!{PATH}\bNAME\b",
        rf"(?:(?<!\w)\(|&& |\|\| ){PATH}\bNAME(?=\))",
        rf"(?:(?<!\w)\(|&& |\|\| |[?:;,] |(?<![=!<>])= |return ){PATH}\bNAME(?= (?:&&|\|\||\?))",
    ]
)
CALL_USE = r"\bint NAME\(|(?:(?<!\w)\(|&& |\|\| |!)NAME\("


@functools.cache
def read(path):
    return path.read_text()


@dataclasses.dataclass(frozen=True)
class Change:
    path: Path
    begin: int
    end: int
    new: str
    function: str  # it is in

    @property
    def source(self):
        return self.path.relative_to(ROOT / "src").as_posix()

    @property
    def line(self):
        return read(self.path).count("\n", 0, self.begin) + 1

    def apply(self):
        text = read(self.path)
        return text[: self.begin] + self.new + text[self.end :]

    @property
    def lines(self):
        """The code before it and after it, without indentation."""
        text = read(self.path)
        begin, end = text.rfind("\n", 0, self.begin) + 1, text.find("\n", self.end)
        lines = text[begin:end], text[begin : self.begin] + self.new + text[self.end : end]
        return tuple(" ".join(line.split()) for line in lines)

    def rank(self, seed):
        """A random number that stays the same however the code around it changes."""
        return hashlib.sha256(repr((seed, self.source, self.function, self.lines)).encode()).digest()

    def __str__(self):
        before, after = self.lines
        return f"src/{self.source}:{self.line}: {before}  ->  {after}"


def read_code(path):
    """The text of a source with all that is not code blanked out."""

    def spaces(found):
        return re.sub(r"[^\n]", " ", found[0])

    code = amalgamate.COMMENT.sub(spaces, blank(read(path)))
    return amalgamate.TOKEN.sub(lambda token: spaces(token) if token["string"] else token[0], code)


def name_of(function):
    return re.search(r"(\w+)\(", function[1])[1]


def closing(code, at):
    """The place at which the bracket that opens here closes; this place, if none does."""
    depth = 0
    while True:
        depth += (code[at] in "([{") - (code[at] in ")]}")
        if not depth:
            return at
        at += 1


def statements(code, at, end):
    """Yield begin and end of each statement before a semicolon."""
    while at < end:
        if code[at].isspace() or code[at] in "{};":
            at += 1
        elif found := HEADER.match(code, at):
            at = closing(code, found.end()) + 1
        elif found := LABEL.match(code, at):
            at = found.end()
        else:
            begin = at
            while code[at] not in ";}":
                at = closing(code, at) + 1
            if code[at] == ";":  # no macro that stands for several
                yield begin, at


@functools.cache
def lines_by_name():
    """The lines of the core, but its kernels, in which each name stands."""
    found = collections.defaultdict(list)
    for path in sorted(ROOT.glob("src/*/*.[ch]")):
        for line in read_code(path).splitlines() if path.parent.name != "kernels" else []:
            for name in set(re.findall(r"\w+", line)):
                found[name].append(line)
    return found


@functools.cache
def is_only_asked(name, use):
    """Whether nobody takes a name for a number, and any but 0 is as good as 1."""
    lines = "\n".join(lines_by_name()[name])
    return len(re.findall(rf"\b{name}\b", lines)) == len(re.findall(use.replace("NAME", name), lines))


def same_in(code):
    """The spans of a source's code a change of which gives the same."""
    found = [match for pattern in SAME for match in pattern.finditer(code)]
    found += [match for match in SET.finditer(code) if is_only_asked(match["name"], FLAG_USE)]
    for function in FUNCTION.finditer(code):
        if is_only_asked(name_of(function), CALL_USE):
            found += YES.finditer(code, *function.span())
    return {match.span("same") for match in found}


def changes_of(path):
    """Yield all changes of a source that somebody could see."""
    same = same_in(read_code(path))
    return (change for change in all_changes_of(path) if (change.begin, change.end) not in same)


def all_changes_of(path):
    code = read_code(path)
    for function in FUNCTION.finditer(code):
        name, (begin, end) = name_of(function), function.span(2 if function[2] else 3)
        for found in OPERATOR.finditer(code, begin, end):
            if found[0] in OTHER:
                yield Change(path, *found.span(), OTHER[found[0]], name)
        for found in NUMBER.finditer(code, begin, end):
            yield Change(path, *found.span(), str(int(found[0]) + 1), name)
        for found in IF.finditer(code, begin, end):
            last = closing(code, found.end()) + 1
            yield Change(path, found.end(), last, f"(!{read(path)[found.end() : last]})", name)
        for first, last in statements(code, begin, end):
            statement = code[first:last]
            if CALL.fullmatch(statement) or ASSIGNMENT.fullmatch(statement):
                yield Change(path, first, last, "", name)
            elif "kvc_status " in function[1].split("(")[0] and re.match(r"return (?!KVC_OK$)", statement):
                yield Change(path, first, last, "return KVC_OK", name)


def possible_changes():
    """All changes of the core that can be drawn."""
    sources = sorted(path for path in ROOT.glob("src/*/*.c") if path.parent.name != "kernels")
    return [change for path in sources for change in changes_of(path)]


def read_listed(changes):
    """The changes that same_changes.txt lists; each of its entries must stand for exactly one."""
    by_text = {}
    for change in changes:
        by_text.setdefault((f"{change.source} {change.function}", *change.lines), []).append(change)
    listed = set()
    for entry in LISTED.read_text().strip().split("\n\n")[1:]:
        if not (found := ENTRY.fullmatch(entry)):
            sys.exit(f"{LISTED.name}: an entry is a reason, a place, a line and what becomes of it:\n{entry}")
        same = by_text.get(found.groups(), [])
        if len(same) != 1:
            sys.exit(f"{LISTED.name}: an entry must stand for one change, and this one does for {len(same)}:\n{entry}")
        listed.add(same[0])
    return listed


# ---- programs


def link(command, parts, core, program):
    """Link a program of the objects of its sources, and a core; return its path."""
    if diverted := diverted_by(*parts):
        core = [divert(command, core, diverted, program.with_suffix(".core.o"))]
    run(*command, *parts.values(), *core, "-o", program, *LIBRARIES)
    return program


@dataclasses.dataclass
class Program:
    """A test, compiled but not linked; how long it takes, and how often it runs each line of a source."""

    sources: tuple[Path, ...]  # the first of which names it
    objects: dict[Path, Path]
    seconds: float = 0  # of a processor
    lines: dict[str, dict[int, int]] = dataclasses.field(default_factory=dict)

    @property
    def name(self):
        return self.sources[0].stem

    def play(self, command, core, folder, seconds):
        """Link it, and run it; return whether it passes, and how many seconds it took."""
        program = link(command, self.objects, core, folder / "program")
        took = 0
        for words in PROGRAMS[self.sources]:
            passes, own = play([program, *words], seconds)
            took += own
            if not passes:
                return False, took
        return True, took

    def runs(self, change):
        """Whether it runs the line of a change; if that has no code of its own, the last one before it that has."""
        lines = self.lines.get(change.source, {})
        return lines.get(max((line for line in lines if line <= change.line), default=0), 0) > 0


def play(command, seconds):
    """Run a program for so many seconds of a processor at most; return whether it passes, and how many it took."""

    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
        start_new_session=True,
        preexec_fn=limit,
    )
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait for what never comes
        process.wait(60 + 10 * seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    passes = process.wait() == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return passes, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(program, command, objects, folder):
    """Run a program on a core that counts."""
    for old in folder.glob("*.gcda"):
        old.unlink()
    passes, program.seconds = program.play(command, objects, folder, 600)
    if not passes:
        sys.exit(f"{program.name} fails without a change")
    for (source, line), count in read_counts(folder)["lines"].items():
        program.lines.setdefault(source, {})[line] = count


def measure_all(programs, command, objects, folder):
    """Measure the programs that were not yet, as they and the core are."""
    folder.mkdir(exist_ok=True)
    counting = [*command, *COUNTING]
    core = b"".join(path.read_bytes() for path in objects)
    objects = None
    for program in programs:
        own = b"".join(path.read_bytes() for path in program.objects.values())
        measured = folder / f"{program.name}.{hashlib.sha256(own + core).hexdigest()[:16]}.json"
        if not measured.exists():
            objects = objects or compile_core(folder, counting)
            measure(program, counting, objects, folder)
            measured.write_text(json.dumps([program.seconds, program.lines]))
        program.seconds, lines = json.loads(measured.read_text())
        program.lines = {source: {int(line): n for line, n in of.items()} for source, of in lines.items()}


class Core:
    """The core in objects, of which one may be of another text, and programs that are linked with it."""

    def __init__(self, folder):
        self.folder = folder
        self.command = [*compiler(), *(flag for flag in FLAGS if flag != "-g1"), "-w", OPENMP]
        self.objects = compile_core(folder, self.command)

    def compile(self, sources):
        """Compile programs, which end at their first failed check; return the object of each source."""
        objects = compile_all(self.folder, sources, lambda _: [*self.command, "-DTEST_STOPS"])
        by_name = {path.stem: path for path in objects}
        return {source: by_name[f"{source.parent.name}-{source.stem}"] for source in sources}

    def change(self, name, text):
        """Return the objects with another text of a source; None if it does not compile, or to the same code."""
        source = self.folder / "changed" / name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(text)
        target = source.parent / f"{source.parent.name}-{source.stem}.o"
        if subprocess.run([*self.command, "-c", source, "-o", target], capture_output=True).returncode:
            return None
        if target.read_bytes() == (self.folder / target.name).read_bytes():
            return None
        return [target if path.name == target.name else path for path in self.objects]

    def simulate(self, *names):
        """Return drive_scheduler, with sources of these names as they were changed last; without the address sanitizer.

        That maps more than MEMORY.
        """
        folder = self.folder / ("changed" if names else "linked")
        folder.mkdir(exist_ok=True)
        return build_simulated((self.command, self.objects), folder, [self.folder / "changed" / name for name in names])


class Bench(Core):
    """The folder in which changes are tried."""

    def __init__(self, folder):
        super().__init__(folder)
        compiled = self.compile([source for sources in PROGRAMS for source in sources])
        self.programs = [Program(sources, {source: compiled[source] for source in sources}) for sources in PROGRAMS]
        measure_all(self.programs, self.command, self.objects, folder / "counted")
        self.programs.sort(key=lambda program: program.seconds)

    def try_change(self, change):
        """Return the names of programs that pass, and of the program that fails; None if there is nothing to try."""
        if not (objects := self.change(change.source, change.apply())):
            return None
        passing = []
        for program in (program for program in self.programs if program.runs(change)):
            seconds = int(3 * program.seconds) + 3
            if not program.play(self.command, objects, self.folder / "changed", seconds)[0]:
                return passing, program.name
            passing.append(program.name)
        simulated = self.simulate(change.source)
        return passing, None if play([simulated, *SIMULATED], 60)[0] else simulated.name


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=200, help="of changes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no change is begun")
    parser.add_argument("--only", default="", help="changes that match this regular expression, as they are printed")
    parser.add_argument("folder", type=Path, nargs="?")
    options = parser.parse_args()
    possible = possible_changes()
    listed = read_listed(possible)
    changes = [change for change in possible if change not in listed and re.search(options.only, str(change))]
    changes.sort(key=lambda change: change.rank(options.seed))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        noticed, tried = try_changes(Bench(folder), changes, options)
    percent = 100 * noticed / max(tried, 1)
    print(f"noticed {noticed} of {tried} changes: {percent:.1f} %; there are {len(changes)}, and {len(listed)} listed")
    return not tried or 100 * noticed < LEAST * tried


def try_changes(bench, changes, options):
    """Try changes in order; return how many were noticed, and how many tried."""
    noticed = tried = 0
    end = time.monotonic() + options.seconds
    for change in changes:
        if tried == options.number or time.monotonic() > end:
            break
        if outcome := bench.try_change(change):
            passing, failing = outcome
            tried += 1
            noticed += failing is not None
            if not failing:
                print(f"{change}\n    passes {', '.join(passing) or 'unseen: no program runs it'}", flush=True)
    return noticed, tried


if __name__ == "__main__":
    sys.exit(main())
