"""A channel of stand-ins for what conda/recipe.yaml asks for: they call the system's compiler, CMake and Python.

With it the recipe is built, tested and installed without a network, and without what others packaged.
"""

import asyncio
import shutil
import site
import sys
from pathlib import Path

PYTHON = "{}.{}".format(*sys.version_info[:2])
PROGRAMS = {  # by package: its version, and the programs it has
    "gcc_linux-64": ("14.0", ("cc", "gcc", "ar", "ranlib", "ld", "strip")),
    "sysroot_linux-64": ("2.17", ()),
    "libgomp": ("14.0", ()),
    "cmake": ("4.0", ("cmake", "ctest")),
    "ninja": ("1.12", ("ninja",)),
    "pkg-config": ("0.29", ("pkg-config",)),
    **{name: (version, ()) for name, version in [
        ("python-abi3", PYTHON), ("pip", "26.0"), ("setuptools", "80.0"), ("cython", "3.1"), ("numpy", "2.4"),
        ("typer", "0.28"), ("rich", "14.0"), ("gguf", "0.17"), ("tokenizers", "0.22"),
    ]},
}  # fmt: skip


def programs():
    """Return the programs that the stand-ins call."""
    return sorted({name for _, names in PROGRAMS.values() for name in names})


def make(folder):
    """Make the channel in a folder, and return its URL."""
    import rattler
    import rattler_build

    def package(name, version, files):
        staged = folder.parent / "staged" / name
        for path, content in files.items():
            (staged / path).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                (staged / path).symlink_to(content)
            else:
                (staged / path).write_text(content)
                (staged / path).chmod(0o755 if path.startswith("bin/") else 0o644)
        staged.mkdir(parents=True, exist_ok=True)
        (folder / "linux-64").mkdir(parents=True, exist_ok=True)
        rattler_build.assemble_package(name, version, "linux-64", "0", folder / "linux-64", files_dir=staged)

    for name, (version, names) in PROGRAMS.items():
        files = {f"bin/{each}": f'#!/bin/sh\nexec {shutil.which(each)} "$@"\n' for each in names}
        if "cc" in names:
            files["etc/conda/activate.d/cc.sh"] = 'export CC="$(command -v cc)"\n'
        package(name, version, files)
    package("python", f"{PYTHON}.0", _python())
    (folder / "noarch").mkdir(exist_ok=True)
    asyncio.run(rattler.index.index_fs(folder))
    return folder.as_uri()


def _python():
    """Return the files of a Python: the running one, with the modules that it has, in an environment of its own."""
    real = Path(sys.base_prefix) / "bin" / f"python{PYTHON}"
    places = [*site.getsitepackages(), *(path for path in sys.path if path.endswith("site-packages"))]
    modules = f"lib/python{PYTHON}/site-packages"
    return {
        "pyvenv.cfg": f"home = {real.parent}\ninclude-system-site-packages = false\nversion = {PYTHON}\n",
        f"{modules}/stand_in.pth": "".join(f"{place}\n" for place in dict.fromkeys(places) if "kvcache" not in place),
        **dict.fromkeys(("bin/python", "bin/python3", f"bin/python{PYTHON}"), real),
    }
