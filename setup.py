"""What pyproject.toml cannot say: the version, which stands in include/kvcache.h, how the extension is built, and what
makes distributions of the same sources the same bytes, wherever and whenever they are built.
"""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from itertools import chain
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError, LinkError

header = Path("include/kvcache.h").read_text()
version = ".".join(re.findall(r"^#define KVC_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)", header, re.MULTILINE))

# One extension for the CPython that requires-python begins with and every later one, but for those without a GIL.
limited = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")


# With KVCACHE_SYSTEM_LIB=1 the module is linked to a libkvcache that is installed already, and there is no other core.
system = os.environ.get("KVCACHE_SYSTEM_LIB") == "1"


def ask_pkg_config(*query):
    command = [os.environ.get("PKG_CONFIG", "pkg-config"), *query, "kvcache"]
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"KVCACHE_SYSTEM_LIB=1: no libkvcache was found ({error}). Install it with CMake, and set PKG_CONFIG_PATH "
            "to the folder of its kvcache.pc."
        )


def installed_library():
    """The folders of the header and of the library, if these are what the sources here can be linked to."""
    found = ask_pkg_config("--modversion")
    (*series, patch), (*ours, least) = ([*map(int, each.split("."))] for each in (found, version))
    if series != ours or patch < least:
        sys.exit(f"KVCACHE_SYSTEM_LIB=1: libkvcache {found} is installed, and these sources are for {version}.")
    return [str(Path(ask_pkg_config(f"--variable={name}")).resolve()) for name in ("includedir", "libdir")]


class BuildPy(build_py):
    def finalize_options(self):
        super().finalize_options()
        if system:  # the header of the installed library holds
            self.packages = [package for package in self.packages if package != "kvcache.include"]


class BuildExt(build_ext):
    def initialize_options(self):
        super().initialize_options()
        self.cython_c_in_temp = True  # keeps the generated C out of the tree, and so out of the sdist

    def get_ext_filename(self, name):
        """Asked with and without the names of packages; the library is no module, and has no ending of one."""
        return f"{name.replace('.', '/')}.so" if name.endswith("libkvcache") else super().get_ext_filename(name)

    def build_extensions(self):
        if system:
            self.use_installed_library()
        else:
            self.configure_core()
        compile_in_turn = self.compiler.compile

        def compile_in_parallel(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [*chain.from_iterable(pool.map(lambda source: compile_in_turn([source], **options), sources))]

        self.compiler.compile = compile_in_parallel
        super().build_extensions()

    def use_installed_library(self):
        """Link to it, and leave word where it lies for kvcache.runtime."""
        if self.editable_mode:
            sys.exit("KVCACHE_SYSTEM_LIB=1 is not for an editable install.")
        include, folder = installed_library()
        module.include_dirs[0] = include
        module.library_dirs.append(folder)
        module.runtime_library_dirs[:] = [folder]
        self.force = True  # what lies there may be linked to a core of its own
        word = self.word()
        word.parent.mkdir(parents=True, exist_ok=True)
        word.write_text(f"{include}\n{folder}/libkvcache.so\n")
        for left in ("include", "lib"):  # by a build with a core, in the same folder
            shutil.rmtree(word.parent / left, ignore_errors=True)

    def word(self):
        return Path(self.get_ext_fullpath(module.name)).parent / "system-library"

    def configure_core(self):
        if self.word().exists():
            self.word().unlink()
            self.force = True
        if self.compiler.compiler_type == "msvc":  # never run
            core.extra_compile_args = ["/std:c11", "/experimental:c11atomics", "/O2"]
            core.libraries = []
        elif self.builds("int main(void) { return 0; }\n", *loops):
            core.extra_compile_args += loops
        if os.environ.get("KVCACHE_OPENMP") != "0":
            if self.builds("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n", "-fopenmp"):
                core.extra_compile_args.append("-fopenmp")
                core.extra_link_args.append("-fopenmp")
            else:
                print("kvcache: the compiler has no OpenMP; the core will run on one thread")
        module.library_dirs.append(str(Path(self.get_ext_fullpath(core.name)).parent))

    def copy_extensions_to_source(self):
        """For an editable install, where nothing else makes this folder."""
        Path("kvcache/lib").mkdir(exist_ok=True)
        super().copy_extensions_to_source()

    def builds(self, program, *flags):
        """Whether the compiler and the linker take these flags."""
        source = Path(self.build_temp, "probe.c")
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(program)
        try:
            objects = self.compiler.compile([str(source)], extra_postargs=[*flags])
            self.compiler.link_executable(objects, str(source.with_suffix("")), extra_postargs=[*flags])
        except (CompileError, LinkError):
            return False
        return True


class Sdist(sdist):
    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        """A .tar.gz that does not tell who made it; nor when, if SOURCE_DATE_EPOCH says what to write instead."""
        if format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)
        epoch = int(os.environ["SOURCE_DATE_EPOCH"]) if "SOURCE_DATE_EPOCH" in os.environ else None

        def anonymous(entry):
            entry.mode = 0o755 if entry.mode & 0o100 else 0o644
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = int(entry.mtime) if epoch is None else epoch
            return entry

        path = f"{base_name}.tar.gz"
        with gzip.GzipFile(path, "wb", mtime=epoch) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(base_dir, filter=anonymous)
        return path


class Wheel(bdist_wheel):
    def write_wheelfile(self, wheelfile_base, **options):
        """The last of the files, after which they are packed with the modes they have here: those of one umask."""
        super().write_wheelfile(wheelfile_base, **options)
        self.write_bill_of_materials(Path(wheelfile_base, "sboms"))
        for path in Path(self.bdist_dir).rglob("*"):
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)

    def write_bill_of_materials(self, folder):
        """What the binaries say they link to, as CycloneDX (PEP 770); there is nothing in them that is not ours."""
        binaries = sorted(Path(self.bdist_dir).rglob("*.so*"))
        if not binaries or not shutil.which("readelf"):
            return
        command = ["readelf", "--dynamic", "--wide", *binaries]
        told = subprocess.run(command, env=os.environ | {"LC_ALL": "C"}, stdout=subprocess.PIPE, text=True, check=True)
        linked = set(re.findall(r"\(NEEDED\).*\[(.+)\]", told.stdout)) - {binary.name for binary in binaries}
        name = self.distribution.get_name()
        purl = f"pkg:pypi/{name}@{version}"
        licenses = [{"expression": self.distribution.metadata.license_expression}]
        us = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, "licenses": licenses}
        others = [{"type": "library", "bom-ref": each, "name": each, "isExternal": True} for each in sorted(linked)]
        bill = {
            "bomFormat": "CycloneDX",
            "specVersion": "1.7",
            "version": 1,
            "metadata": {"component": us},
            "components": others,
            "dependencies": [{"ref": purl, "dependsOn": sorted(linked)}],
        }
        folder.mkdir()
        (folder / f"{name}.cdx.json").write_text(json.dumps(bill, indent=2) + "\n")


# Without what Python's own flags have for debuggers, which is the folder it was built in, and most of the bytes. The
# kernels are unrolled by hand: with -O3 they are a sixth larger and no faster. For other loops GCC is told to do what
# Clang does at -O2 anyway.
loops = ["-ftree-vectorize", "-fvect-cost-model=dynamic"]
flags = ["-std=c11", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
if os.environ.get("KVCACHE_WERROR") == "1":
    flags.append("-Werror")

# The core is a library of its own, for whoever wants it (kvcache.get_library); the module is linked to it.
core = Extension(
    "kvcache.lib.libkvcache",
    sources=sorted(glob("src/*/*.c")),
    depends=sorted(glob("include/*.h") + glob("src/*/*.h")),
    include_dirs=["include", "src"],
    libraries=["m", "pthread"],
    extra_compile_args=[*flags],
    extra_link_args=["-Wl,-soname,libkvcache.so"] if sys.platform == "linux" else [],
)
module = Extension(
    "kvcache._core",
    sources=["kvcache/_core.pyx"],
    depends=["include/kvcache.h", "kvcache/_core.pxd", *sorted(glob("kvcache/binding/*.pxi"))],
    include_dirs=["include", numpy.get_include()],
    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
    libraries=["kvcache", "m"],
    runtime_library_dirs=["$ORIGIN/lib"],
    extra_compile_args=[*flags],
    py_limited_api=limited,
)
if limited:
    module.define_macros.append(("Py_LIMITED_API", "0x030B0000"))

setup(
    version=version,
    ext_modules=[module] if system else [core, module],  # in this order
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy, "bdist_wheel": Wheel, "sdist": Sdist},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if limited else {},
)
