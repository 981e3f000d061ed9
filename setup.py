"""What pyproject.toml cannot say: the version, which stands in include/kvcache.h, and how the extension is built."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from itertools import chain
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

header = Path("include/kvcache.h").read_text()
version = ".".join(re.findall(r"^#define KVC_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)", header, re.MULTILINE))


class BuildExt(build_ext):
    def initialize_options(self):
        super().initialize_options()
        self.cython_c_in_temp = True  # keeps the generated C out of the tree, and so out of the sdist

    def build_extensions(self):
        if os.environ.get("KVCACHE_OPENMP") != "0" and self.has_openmp():
            for extension in self.extensions:
                extension.extra_compile_args.append("-fopenmp")
                extension.extra_link_args.append("-fopenmp")
        compile_in_turn = self.compiler.compile

        def compile_in_parallel(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [*chain.from_iterable(pool.map(lambda source: compile_in_turn([source], **options), sources))]

        self.compiler.compile = compile_in_parallel
        super().build_extensions()

    def has_openmp(self):
        source = Path(self.build_temp, "openmp.c")
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n")
        try:
            objects = self.compiler.compile([str(source)], extra_postargs=["-fopenmp"])
            self.compiler.link_executable(objects, str(source.with_suffix("")), extra_postargs=["-fopenmp"])
        except (CompileError, LinkError):
            print("kvcache: the compiler has no OpenMP; the core will run on one thread")
            return False
        return True


core = Extension(
    "kvcache._core",
    sources=["kvcache/_core.pyx", *sorted(glob("src/*.c") + glob("src/kernels/*.c"))],
    depends=sorted(glob("include/*.h") + glob("src/*.h") + glob("src/kernels/*.h")),
    include_dirs=["include", "src", numpy.get_include()],
    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
    libraries=["m", "pthread"],
    extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"],
)
if os.environ.get("KVCACHE_WERROR") == "1":
    core.extra_compile_args.append("-Werror")

setup(version=version, ext_modules=[core], cmdclass={"build_ext": BuildExt})
