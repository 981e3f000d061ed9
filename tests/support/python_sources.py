"""Read how long the package's functions and files are, and what its modules import."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvcache"
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # their public methods and attributes
CYTHON_IMPORT = re.compile(r"^(?:from|import) ([\w.]+)", re.M)
CYTHON_FUNCTION = re.compile(r"^( *)(?:async )?(?:def|cdef|cpdef)\b(?! class\b)[^=#\n]*?(\w+)\(", re.M)
CYTHON_SIGNATURE_END = re.compile(r"\)[^()\n]*:[^\n]*\n")
CYTHON_DOCSTRING = re.compile(r':\n *r?"""(?s:.*?)"""\n')


def module_name(path):
    """kvcache.plot of kvcache/plot.py, kvcache of kvcache/__init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def docstring_lines(node):
    """Lines of the node's own docstring."""
    if ast.get_docstring(node, clean=False) is None:
        return 0
    return node.body[0].end_lineno - node.body[0].lineno + 1


def python_functions(tree):
    """Name and lines of each function, docstrings aside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstrings = sum(docstring_lines(inner) for inner in ast.walk(node) if isinstance(inner, DOCUMENTED))
            yield node.name, node.end_lineno - node.lineno + 1 - docstrings


def cython_functions(text):
    """The same of a text without docstrings: a function ends where a line is indented no more than its first."""
    for head in CYTHON_FUNCTION.finditer(text):
        signature = CYTHON_SIGNATURE_END.search(text, head.end())
        if signature:
            end = re.compile(rf"^ {{0,{len(head[1])}}}\S", re.M).search(text, signature.end())
            body = text[head.start() : end.start() if end else len(text)]
            yield head[2], body.rstrip().count("\n") + 1


def lengths(path):
    """The lines of a file without docstrings, and the lines of its functions, by name."""
    text = path.read_text()
    if path.suffix in (".pyx", ".pxi", ".pxd"):
        text = CYTHON_DOCSTRING.sub(":\n", text)
        return text.count("\n"), [*cython_functions(text)]
    tree = ast.parse(text)
    docstrings = sum(docstring_lines(node) for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
    return text.count("\n") - docstrings, [*python_functions(tree)]


def imports(path):
    """The modules that a file imports anywhere, in full: of `from . import errors` in plot.py, kvcache.errors."""
    for module, name in imported_names(path):
        yield module
        if name:
            yield f"{module}.{name}"


def imported_names(path):
    """The modules that a file imports anywhere, under TYPE_CHECKING too, each with the name taken from it, or ""."""
    if path.suffix == ".pyx":
        yield from ((module, "") for module in CYTHON_IMPORT.findall(path.read_text()))
        return
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield from ((module, alias.name) for alias in node.names)


def imports_between_modules(folder=PACKAGE):
    """For each module of a package, the modules that it imports: for `from kvcache import state`, kvcache.state alone.

    That importing a module runs the `__init__.py` of its packages does not count.
    """
    paths = {module_name(path): path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".pyx")}
    used = {}
    for module, path in paths.items():
        named = {f"{other}.{name}" if f"{other}.{name}" in paths else other for other, name in imported_names(path)}
        used[module] = (named & paths.keys()) - {module}
    return used


def private_names(path):
    """The private modules, names and attributes of others that a file uses: of `import kvcache._core`, `_core`."""
    for module, name in imported_names(path):
        if module.split(".")[0] == "kvcache":
            yield from filter(is_private, [*module.split("."), name])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in NAMED_TUPLE:
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls"):
                yield f"{owner}.{node.attr}"


def is_private(name):
    return name.startswith("_") and not name.endswith("__")
