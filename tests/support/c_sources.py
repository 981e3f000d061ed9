"""Read what the core's sources define, include and use, with the tokeniser of tools/amalgamate.py."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"


def load_tool(name):
    """A module of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


amalgamate = load_tool("amalgamate")


@dataclass
class Function:
    name: str
    is_static: bool
    text: str  # from its type to its closing brace

    @property
    def num_lines(self):
        return self.text.count("\n") + 1


@dataclass
class Source:
    """A .c or .h file below src/."""

    path: Path
    functions: list[Function]  # and macros that take arguments
    used: set[str]  # identifiers in bodies, initialisers and macros, fields aside

    @property
    def name(self):
        """Its path from src."""
        return self.path.relative_to(SRC).as_posix()

    @property
    def unit(self):
        """x.c and x.h are one."""
        return self.name.removesuffix(self.path.suffix)

    @property
    def folder(self):
        return self.path.parent.relative_to(SRC).as_posix()

    @property
    def num_lines(self):
        return len(self.path.read_text().splitlines())

    @property
    def includes(self):
        """The project's files that it includes, as paths from src or from include."""
        for file in amalgamate.files_included(self.path):
            yield file.relative_to(SRC if SRC in file.parents else ROOT / "include").as_posix()

    def visible(self):
        """Functions that other files may call: a template's are part of whoever includes it."""
        if self.path.suffix == ".h":
            return set() if amalgamate.is_template(self.path) else {f.name for f in self.functions}
        return {f.name for f in self.functions if not f.is_static}


def macros(text):
    """Name and text of each macro that takes arguments."""
    for directive in amalgamate.DIRECTIVE.finditer(text):
        if name := re.match(r" *# *define (\w+)\(", directive[0]):
            yield name[1], directive[0]


def blank(text):
    """The text with its directives blanked out, line by line."""
    return amalgamate.DIRECTIVE.sub(lambda directive: re.sub(r"[^\n]", " ", directive[0]), text)


def names_in(text, inside_only):
    """Identifiers that name no field; inside_only: those in brackets, which leaves declarations out."""
    for token, before, _, inside in amalgamate.scan(text):
        if re.match("[A-Za-z_]", token[0]) and before not in (".", "->") and (inside or not inside_only):
            yield token[0]


def functions_of(text):
    """The functions that are defined in a text without directives."""
    start = candidate = defined = None
    is_static = False
    for token, before, after, inside in amalgamate.scan(text):
        word = token[0]
        if inside:
            continue
        if start is None:
            start, is_static = token.start(), False
        is_static |= word in ("static", "INLINE", "RARE")
        if after == "(":
            candidate = word
        elif word == "{":
            defined = candidate if before == ")" else None
        elif word == "}" and defined:
            yield Function(defined, is_static, text[start : token.end()])
            start = None
        elif word == ";":
            start = None


def read(path):
    """Parse one file."""
    text = path.read_text()
    functions, used = [*functions_of(blank(text))], {*names_in(blank(text), inside_only=True)}
    for name, body in macros(text):
        functions.append(Function(name, True, body))
        used |= {*names_in(body, inside_only=False)}
    return Source(path, functions, used)


def read_all():
    """All of src/."""
    return [read(path) for path in sorted(SRC.glob("**/*.[ch]"))]


def calls_between_units(sources):
    """For each unit: the other units whose functions it uses, with the names of these functions."""
    home = {name: source.unit for source in sources for name in source.visible()}
    graph = {source.unit: {} for source in sources}
    for source in sources:
        for name in source.used & home.keys():
            if home[name] != source.unit:
                graph[source.unit].setdefault(home[name], set()).add(name)
    return graph


def reachable(graph, start):
    """The units that a unit's calls lead to, itself only if they lead back."""
    found, open_ones = set(), [start]
    while open_ones:
        for unit in graph[open_ones.pop()]:
            if unit not in found:
                found.add(unit)
                open_ones.append(unit)
    return found


def circles(graph):
    """Sets of two or more units that call each other in a circle."""
    reach = {unit: reachable(graph, unit) for unit in graph}
    return {frozenset(v for v in reach[u] if u in reach[v]) for u in graph if u in reach[u]}
