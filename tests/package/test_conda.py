"""The conda recipe says what the package says, and rattler-build renders it."""

import asyncio
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvcache

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "conda/recipe.yaml"


def outputs(platform):
    """Return what rattler-build renders: for each package name its variants, each as a dictionary."""
    rattler_build = pytest.importorskip("rattler_build")
    target = rattler_build.PlatformConfig(target_platform=platform)
    variants = rattler_build.VariantConfig.from_file_with_context(
        RECIPE.with_name("variants.yaml"), rattler_build.JinjaConfig(platform=target)
    )
    recipe = rattler_build.Stage0Recipe.from_file(RECIPE)
    found = {}
    for output in recipe.render(variants, rattler_build.RenderConfig(platform=target)):
        found.setdefault(output.recipe.package.name, {})[output.variant.get("python")] = output.recipe.to_dict()
    return found


def test_version():
    assert re.findall(r'^  version: "(.+)"$', RECIPE.read_text(), re.MULTILINE) == [kvcache.__version__]


def spelt(requirements):
    """Requirements as the recipe writes them."""
    return {re.sub(" ?([<>=]+)", r" \1", requirement.lower()) for requirement in requirements}


@pytest.mark.parametrize("platform", ["linux-64", "linux-aarch64"])
def test_it_asks_for_what_the_package_asks_for(platform):
    says = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = says["project"]
    found = outputs(platform)
    assert set(found) == {"libkvcache", "kvcache"}
    ((python, output),) = found["kvcache"].items()  # one build for all
    assert python == project["requires-python"].removeprefix(">=") + ".*"
    assert output["build"]["python"]["version_independent"]
    assert {"python", "python-abi3"} < set(map(str, output["requirements"]["host"]))
    assert spelt(says["build-system"]["requires"]) <= set(map(str, output["requirements"]["host"]))
    command = [each for each in project["optional-dependencies"]["cli"] if "sys_platform != 'linux'" not in each]
    run = [*project["dependencies"], *command, f"python{project['requires-python']}"]
    assert spelt(run) == set(output["requirements"]["run"])
    scripts = output["build"]["python"]["entry_points"]
    assert scripts == [f"{name} = {function}" for name, function in project["scripts"].items()]
    assert output["about"].get("homepage") == project.get("urls", {}).get("Homepage")
    assert output["about"]["license_file"] == project["license-files"]


def test_the_core_is_the_library_s():
    output = outputs("linux-64")["kvcache"]["3.11.*"]
    assert output["build"]["script"]["env"] == {"KVCACHE_SYSTEM_LIB": "1"}
    (pin,) = (each["pin_subpackage"] for each in output["requirements"]["host"] if isinstance(each, dict))
    assert pin == {"name": "libkvcache", "exact": True}


def test_it_is_tested():
    tests = str(outputs("linux-64")["kvcache"]["3.11.*"]["tests"])
    assert all(each in tests for each in ("'imports'", "kvcache --version", "${CC} version.c", "not_exists"))


@pytest.mark.parametrize("platform", ["osx-64", "osx-arm64", "win-64"])
def test_there_is_none_where_it_was_never_built(platform):
    assert outputs(platform) == {}


def test_who_links_to_the_library_asks_for_its_minor_version():
    (library,) = outputs("linux-64")["libkvcache"].values()
    (pin,) = library["requirements"]["run_exports"]["weak"]
    assert pin["pin_subpackage"]["name"] == "libkvcache"
    assert pin["pin_subpackage"]["upper_bound"] == "x.x"


# ---- built

PYTHON = "{}.{}".format(*sys.version_info[:2])
# Stand-ins for what the recipe asks for, by package: its version, and the programs of the system that it calls.
PROGRAMS = {
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


def make_channel(folder):
    """Make a channel of the stand-ins in a folder, without a network and what others packaged; return its URL."""
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


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:build_recipes is deprecated")
def test_it_is_built_and_installed_from_a_local_channel(tmp_path):
    """With the system's compiler, CMake and Python in the place of packages, so that no network is needed."""
    rattler_build, rattler = pytest.importorskip("rattler_build"), pytest.importorskip("rattler")
    if missing := [name for name in programs() if not shutil.which(name)]:
        pytest.skip(f"no {', '.join(missing)} here")
    if PYTHON != "3.11" or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("the recipe's first variant is Python 3.11 on x86-64 Linux")
    channel, out, prefix = make_channel(tmp_path / "channel"), tmp_path / "out", tmp_path / "prefix"
    rattler_build.build_recipes([RECIPE], channel=[channel], output_dir=out, test="skip")

    async def install():
        found = await rattler.solve([out.as_uri(), channel], ["kvcache"], platforms=["linux-64", "noarch"])
        await rattler.install(found, prefix, cache_dir=tmp_path / "cache", show_progress=False)

    asyncio.run(install())
    shutil.rmtree(out)  # what it was built with is gone
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVCACHE"))}
    environment |= {"PKG_CONFIG_PATH": f"{prefix}/lib/pkgconfig", "PATH": f"{prefix}/bin:{os.environ['PATH']}"}

    def shell(line):
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert shell("kvcache --version") == kvcache.__version__
    assert Path(shell('python -c "import kvcache; print(kvcache.get_library())"')) == prefix / "lib/libkvcache.so"
    assert (prefix / "share/licenses/kvcache/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    (tmp_path / "main.c").write_text("#include <kvcache.h>\nint main(void) { return kvc_version() < 1000; }\n")
    shell(f"cc main.c -o main $(pkg-config --cflags --libs kvcache) -Wl,-rpath,{prefix}/lib && ./main")
