"""Build the parts of the package that pyproject.toml cannot describe.

The version is read from include/kvcache.h, and the description from README.md. The core and the extension module are
compiled. Distributions of the same sources are the same bytes, wherever and whenever they are built.
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
import tempfile
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from itertools import chain
from pathlib import Path
from threading import Event

import numpy
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError, LinkError

headers = sorted(glob("include/*.h"))
text = Path("include/kvcache.h").read_text()
version = ".".join(re.findall(r"^#define KVC_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)", text, re.MULTILINE))

# With the limited API one build serves every CPython from 3.11 on, except those without a GIL.
limited = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")

windows = sys.platform == "win32"
# What is built for: under _PYTHON_HOST_PLATFORM another system than this one.
system_name = sysconfig.get_platform().partition("-")[0]
macos = system_name == "macosx"

# KVCACHE_SYSTEM_LIB=1 links the module to an installed libkvcache instead of compiling a core.
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
    """Return the folders of the installed header and library; exit unless their version fits these sources."""
    found = ask_pkg_config("--modversion")
    (*series, patch), (*needed_series, least_patch) = ([*map(int, each.split("."))] for each in (found, version))
    if series != needed_series or patch < least_patch:
        sys.exit(f"KVCACHE_SYSTEM_LIB=1: libkvcache {found} is installed, and these sources are for {version}.")
    return [str(Path(ask_pkg_config(f"--variable={name}")).resolve()) for name in ("includedir", "libdir")]


class BuildPy(build_py):
    def finalize_options(self):
        """Add the public headers to the package, unless the system's library brings its own."""
        super().finalize_options()
        if not system:
            names = [Path(path).name for path in headers]
            self.data_files += [("kvcache.include", "include", f"{self.build_lib}/kvcache/include", names)]


class BuildExt(build_ext):
    def initialize_options(self):
        super().initialize_options()
        self.cython_c_in_temp = True  # keeps the generated C out of the source tree and of the sdist
        self.core_ended = Event()

    def get_ext_filename(self, name):
        """Name the library without the suffix of an extension module."""
        if not name.endswith("libkvcache"):
            return super().get_ext_filename(name)
        return f"{name.replace('.', '/')}.{'dll' if windows else 'so'}"

    def get_export_symbols(self, extension):
        """Leave out Windows' PyInit_libkvcache."""
        return [] if extension is core else super().get_export_symbols(extension)

    def get_libraries(self, extension):
        """Link the core to no Python, and the module to the one of the limited API; Windows' names the library."""
        if not windows or (extension is module and not limited):
            return super().get_libraries(extension)
        return [*extension.libraries, *(["python3"] if extension is module else [])]

    def run(self):
        """Take MinGW on Windows: Microsoft's compiler lacks what the core needs of C11 and of GNU C."""
        if not os.environ.get("CC", "").strip():  # an empty one would be run as a command
            os.environ.pop("CC", None)
        if windows:
            self.compiler = self.compiler or "mingw32"
            if self.compiler != "mingw32":
                sys.exit(f"--compiler={self.compiler} cannot build kvcache: use mingw32, which is the default.")
            if "CC" not in os.environ and not shutil.which("gcc"):
                sys.exit("No gcc was found: put the one of MinGW-w64 on PATH, or set CC to a Clang for it.")
        super().run()

    def build_extensions(self):
        if system:
            self.use_installed_library()
            self.core_ended.set()
        else:
            self.configure_core()
        self.build_in_parallel()
        super().build_extensions()

    def build_in_parallel(self):
        """Compile the core's files side by side, and the module beside them; link it when the core is there."""
        if macos:  # a bundle, which Python asks for, cannot be linked to
            self.compiler.linker_so = ["-dynamiclib" if each == "-bundle" else each for each in self.compiler.linker_so]
        self.parallel = len(self.extensions)
        compile_one_by_one, link = self.compiler.compile, self.compiler.link_shared_object

        def compile_side_by_side(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [*chain.from_iterable(pool.map(lambda source: compile_one_by_one([source], **options), sources))]

        def link_after_the_core(objects, path, **options):
            if path == self.get_ext_fullpath(module.name):
                self.core_ended.wait()
            link(objects, path, **options)

        self.compiler.compile, self.compiler.link_shared_object = compile_side_by_side, link_after_the_core

    def build_extension(self, extension):
        try:
            super().build_extension(extension)
        finally:  # if the core has failed, the module fails too, and the core's error is the one that is shown
            if extension is core:
                self.core_ended.set()

    def use_installed_library(self):
        """Link to the installed library, and write its place to a file for kvcache.runtime."""
        if self.editable_mode:
            sys.exit("KVCACHE_SYSTEM_LIB=1 is not for an editable install.")
        include, folder = installed_library()
        module.include_dirs[0] = include
        module.library_dirs.append(folder)
        module.runtime_library_dirs[:] = [folder]
        self.force = True  # an earlier build may have linked the module to a core of its own
        location = self.location_file()
        location.parent.mkdir(parents=True, exist_ok=True)
        location.write_text(f"{include}\n{folder}/libkvcache.so\n")
        for leftover in ("include", "lib"):  # an earlier build with a core may have put these there
            shutil.rmtree(location.parent / leftover, ignore_errors=True)

    def location_file(self):
        """Return the path of the file that says where the installed library is."""
        return Path(self.get_ext_fullpath(module.name)).parent / "system-library"

    def configure_core(self):
        if self.location_file().exists():  # an earlier build linked the module to an installed library
            self.location_file().unlink()
            self.force = True
        for each in [loops, unaligned] if windows else [loops]:
            if self.builds("int main(void) { return 0; }\n", *each):
                core.extra_compile_args += each
        # Windows would not find the runtime of MinGW's OpenMP.
        if not windows and os.environ.get("KVCACHE_OPENMP") != "0" and self.builds(region, "-fopenmp"):
            core.extra_compile_args.append("-fopenmp")
            core.extra_link_args.append("-fopenmp")
        module.library_dirs.append(str(Path(self.get_ext_fullpath(core.name)).parent))

    def copy_extensions_to_source(self):
        """Make the library's folder first, which is missing in an editable install."""
        Path(self.get_ext_filename(core.name)).parent.mkdir(exist_ok=True)
        super().copy_extensions_to_source()

    def builds(self, program, *flags):
        """Whether a program compiles and links with these flags."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(program)
            try:  # without output_dir, the object would lie under tmp/ in the sources
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=[*flags])
                self.compiler.link_executable(objects, "probe", output_dir=folder, extra_postargs=[*flags])
            except (CompileError, LinkError):
                return False
        return True


class Sdist(sdist):
    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        """Write a .tar.gz without user and group names, and with SOURCE_DATE_EPOCH, if set, as every file's time."""
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
        """Add the bill of materials, and set all modes, which depend on the umask otherwise; this runs last."""
        super().write_wheelfile(wheelfile_base, **options)
        self.write_bill_of_materials(Path(wheelfile_base, "sboms"))
        for path in Path(self.bdist_dir).rglob("*"):
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)

    def write_bill_of_materials(self, folder):
        """List the libraries that the binaries link to, as CycloneDX (PEP 770). No other code is compiled in."""
        binaries = sorted(Path(self.bdist_dir).rglob("*.so*"))
        if not binaries or system_name != "linux" or not shutil.which("readelf"):
            return
        command = ["readelf", "--dynamic", "--wide", *binaries]
        done = subprocess.run(command, env=os.environ | {"LC_ALL": "C"}, stdout=subprocess.PIPE, text=True, check=True)
        linked = set(re.findall(r"\(NEEDED\).*\[(.+)\]", done.stdout)) - {binary.name for binary in binaries}
        name = self.distribution.get_name()
        purl = f"pkg:pypi/{name}@{version}"
        licenses = [{"expression": self.distribution.metadata.license_expression}]
        package = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        package["licenses"] = licenses
        libraries = [{"type": "library", "bom-ref": each, "name": each, "isExternal": True} for each in sorted(linked)]
        bill = {
            "bomFormat": "CycloneDX",
            "specVersion": "1.7",
            "version": 1,
            "metadata": {"component": package},
            "components": libraries,
            "dependencies": [{"ref": purl, "dependsOn": sorted(linked)}],
        }
        folder.mkdir()
        (folder / f"{name}.cdx.json").write_text(json.dumps(bill, indent=2) + "\n")


# `region` shows whether the compiler has OpenMP: its header, and a runtime to link to.
region = """
#include <omp.h>
int main(void) {
    int places = omp_get_num_places();
#pragma omp parallel reduction(+ : places)
    places += omp_in_parallel();
    return places < 0;
}
"""

# -g0 drops what Python's own flags add for debuggers: most of the bytes, and the name of the build folder. The kernels
# are unrolled by hand: -O3 makes them a sixth larger and no faster. `loops` makes GCC vectorise as Clang does at -O2.
# `unaligned` is for GCC's bug 54412: it takes the stack of Windows for aligned to 32 bytes.
loops = ["-ftree-vectorize", "-fvect-cost-model=dynamic"]
unaligned = ["-Wa,-muse-unaligned-vector-move"]
flags = ["-std=c11", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
if os.environ.get("KVCACHE_WERROR") == "1":
    flags.append("-Werror")

names = {"linux": ["-Wl,-soname,libkvcache.so"], "macosx": ["-Wl,-install_name,@rpath/libkvcache.so"]}

# The core is a library of its own, to which the module links, and other programs can (kvcache.get_library). Windows
# looks for it beside the module.
core = Extension(
    "kvcache.libkvcache" if windows else "kvcache.lib.libkvcache",
    sources=sorted(glob("src/*/*.c")),
    depends=[*headers, *sorted(glob("src/*/*.h"))],
    include_dirs=["include", "src"],
    define_macros=[("KVC_SHARED", None), ("KVC_BUILD", None)] if windows else [],
    libraries=[] if windows else ["m", "pthread"],
    extra_compile_args=[*flags],
    extra_link_args=["-static"] if windows else names.get(system_name, []),
)
module = Extension(
    "kvcache._core",
    sources=["kvcache/_core.pyx"],
    depends=[*headers, "src/rows/stride.h", "kvcache/_core.pxd", *sorted(glob("kvcache/binding/*.pxi"))],
    include_dirs=["include", numpy.get_include(), "src"],
    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
    libraries=["kvcache"] if windows else ["kvcache", "m"],
    runtime_library_dirs=[] if windows else ["@loader_path/lib" if macos else "$ORIGIN/lib"],
    extra_compile_args=[*flags, "-O1"],  # as fast as with -O2, in 0.6 of the time, and smaller when packed
    py_limited_api=limited,
)
if limited:
    module.define_macros.append(("Py_LIMITED_API", "0x030B0000"))

# An index of packages shows README alone: without its pictures, and without links to other files.
readme = re.sub(r"^!\[.*\n\n", "", Path("README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
readme = re.sub(r"\[([^]]+)\]\((?!https:)[^)]+\)", r"\1", readme)

setup(
    version=version,
    long_description=readme,
    long_description_content_type="text/markdown",
    ext_modules=[module] if system else [core, module],  # the core first: the module links to it
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy, "bdist_wheel": Wheel, "sdist": Sdist},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if limited else {},
)
