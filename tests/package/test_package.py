"""What `import kvcache` costs and brings: names, docstrings, the version, the report of the machine."""

import ctypes
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import files, metadata
from pathlib import Path

import pytest
from support.programs import run_python

import kvcache
from kvcache import _core
from kvcache.layer import DTYPES

NAMES = {
    "Adaptive",
    "Batch",
    "Block",
    "CacheBusyError",
    "CacheFullError",
    "ChunkedAttention",
    "CrossAttention",
    "FullAttention",
    "KVCache",
    "KVCacheError",
    "Layer",
    "LongSequencesOnly",
    "ModelFileError",
    "NotSupportedError",
    "PrefixCache",
    "PrefixEvent",
    "PrefixStats",
    "Rope",
    "RowsGoneError",
    "Run",
    "SlidingWindow",
    "Span",
    "StateFormatError",
    "get_include",
    "get_library",
    "get_num_threads",
    "get_threading_layer",
    "set_num_threads",
    "show_config",
}


def test_names():
    assert set(kvcache.__all__) == NAMES | {"__version__"}
    assert all(hasattr(kvcache, name) for name in kvcache.__all__)


def test_import_brings_nothing_but_numpy():
    code = """
import numpy
before = set(sys.modules)
import kvcache
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(name for name in new - sys.stdlib_module_names if "cython" not in name))
"""
    assert set(run_python(code).split()) <= {"kvcache", "numpy"}


def test_sources_that_hide_the_installed_package_are_named(tmp_path):
    (tmp_path / "kvcache").mkdir()
    shutil.copy(kvcache.__file__, tmp_path / "kvcache")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kvcache"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{tmp_path / 'kvcache'} holds the sources" in done.stderr
    assert f"Run `pip install -e .` in {tmp_path}/, or run Python from another folder." in done.stderr


@pytest.mark.parametrize("module", ["ml_dtypes", "torch"])
def test_no_type_but_bf16_brings_more(module):
    code = f"""
import numpy, kvcache
cache = kvcache.KVCache(1, 1, 8, 16)
x = numpy.ones((1, 1, 8), numpy.float32)
with cache.batch(1) as batch:
    batch.attend(0, x, x, x)
print({module!r} in sys.modules)
"""
    assert run_python(code) == "False\n"


def public_things():
    """Every public name with its object: those of the package, and the methods and properties of its classes."""
    for name in sorted(NAMES):
        thing = getattr(kvcache, name)
        yield name, thing
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            for attribute, value in vars(thing).items():
                if not attribute.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
                    yield f"{name}.{attribute}", value


@pytest.mark.parametrize("name", [name for name, _ in public_things()])
def test_docstrings(name):
    text = inspect.getdoc(dict(public_things())[name])
    assert text
    assert text.splitlines()[0].endswith("."), "the first line is a sentence"


def test_errors():
    for error in (kvcache.CacheBusyError, kvcache.CacheFullError, kvcache.NotSupportedError, kvcache.RowsGoneError):
        assert issubclass(error, kvcache.KVCacheError)
    assert issubclass(kvcache.NotSupportedError, NotImplementedError)
    assert issubclass(kvcache.ModelFileError, kvcache.KVCacheError)
    assert issubclass(kvcache.ModelFileError, ValueError)
    assert not issubclass(kvcache.CacheFullError, MemoryError)


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", kvcache.__version__)


def test_the_description_leads_nowhere_else():
    """An index of packages shows it, which has no other file of the repository."""
    described = metadata("kvcache")
    text = described["Description"] or described.get_payload()
    assert text.lstrip().startswith("# kvcache\n")
    assert not re.findall(r"\]\((?!https:)", text)


def test_show_config(capsys):
    kvcache.show_config()
    printed = re.sub(r"\n +", " ", capsys.readouterr().out)  # a long value goes on in indented lines
    found = kvcache.show_config(mode="dicts")
    assert found["kvcache"] == kvcache.__version__
    assert found["num_threads"] == kvcache.get_num_threads()
    assert len(printed.splitlines()) == len(found)
    for name, value in found.items():
        assert re.search(rf"^{name} +{re.escape('-' if value is None else str(value))}$", printed, re.MULTILINE)


def test_the_instruction_set_can_be_chosen():
    code = "import kvcache; print(kvcache.show_config('dicts')['isa'])"
    assert run_python(code, KVCACHE_ISA="scalar") == "scalar\n"


def test_num_threads():
    before = kvcache.get_num_threads()
    try:
        kvcache.set_num_threads(1)
        assert kvcache.get_num_threads() == 1
    finally:
        kvcache.set_num_threads(None)
    assert kvcache.get_num_threads() == before >= 1


def test_the_types_are_those_of_the_library():
    name_of = ctypes.CDLL(kvcache.get_library()).kvc_type_name
    name_of.restype = ctypes.c_char_p
    names = itertools.takewhile(bool, map(name_of, itertools.count()))
    assert {name.decode(): type_ for type_, name in enumerate(names)} == _core.TYPES
    assert tuple(_core.TYPES) == DTYPES


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="no /proc here says what is mapped")
def test_there_is_one_core_in_the_process():
    code = """
import ctypes, kvcache, os
ctypes.CDLL(kvcache.get_library())
with open("/proc/self/maps") as maps:
    found = {line.split(maxsplit=5)[5].strip() for line in maps if "libkvcache" in line}
print(found == {os.path.realpath(kvcache.get_library())})
"""
    assert run_python(code) == "True\n"


def test_a_c_program_is_built_on_what_the_package_names(tmp_path):
    """Programs build with the header and the library it names, be they its own or those it was built on."""
    compiler = os.environ.get("CC") or shutil.which("cc") or pytest.skip("no C compiler")
    folder = os.path.dirname(kvcache.get_library())
    (tmp_path / "main.c").write_text(
        "#include <kvcache.h>\n#include <stdio.h>\nint main(void) { return puts(kvc_build_info()) < 0; }\n"
    )
    command = [*compiler.split(), "main.c", "-o", "main", f"-I{kvcache.get_include()}", kvcache.get_library()]
    subprocess.run([*command, f"-Wl,-rpath,{folder}"], cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "main"], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert printed.strip() == kvcache.show_config("dicts")["build"]


def bills_of_materials():
    """Return the wheel's bills of materials: ours, and auditwheel's of the libraries that it copied in."""
    found = [path.read_text() for path in files("kvcache") if path.match("*.dist-info/sboms/*.cdx.json")]
    return found or pytest.skip("there is none: installed in place, or built where there was no readelf")


def test_the_bill_of_materials_names_what_is_linked():
    bills = [json.loads(text) for text in bills_of_materials()]
    (ours,) = (
        bill for bill in bills if bill["metadata"]["component"]["purl"] == f"pkg:pypi/kvcache@{kvcache.__version__}"
    )
    names = {component["name"] for component in ours["components"]}
    assert any(re.match(r"libc\b", name) for name in names)
    has_core = Path(kvcache.get_library()).is_relative_to(Path(kvcache.__file__).parent)
    has_openmp = has_core and "OpenMP 20" in kvcache.show_config("dicts")["build"]
    assert any(name.startswith("libkvcache") for name in names) != has_core
    assert any(re.match(r"lib[gi]?omp", name) for name in names) == has_openmp


def test_the_bill_of_materials_is_cyclonedx():
    schema = pytest.importorskip("cyclonedx.schema")
    validators = pytest.importorskip("cyclonedx.validation.json")
    for text in bills_of_materials():
        version = schema.SchemaVersion.from_version(json.loads(text)["specVersion"])
        assert validators.JsonStrictValidator(version).validate_str(text) is None
