"""The conda recipe says what the package says, and rattler-build renders it."""

import re
import tomllib
from pathlib import Path

import pytest

import kvcache

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "conda/recipe.yaml"


def outputs(platform):
    """What rattler-build makes of the recipe: for every name of a package, its variants, each as a dictionary."""
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


@pytest.mark.parametrize("platform", ["linux-64", "linux-aarch64", "osx-64", "osx-arm64"])
def test_it_asks_for_what_the_package_asks_for(platform):
    def spelt(requirements):
        return {requirement.lower().replace(">=", " >=") for requirement in requirements}

    says = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = says["project"]
    tested = {text.rpartition(" :: ")[2] for text in project["classifiers"] if re.search(r"Python :: 3\.\d+", text)}
    found = outputs(platform)
    assert set(found) == {"libkvcache", "kvcache"}
    assert set(found["kvcache"]) == {f"{python}.*" for python in tested}
    for output in found["kvcache"].values():
        assert spelt(says["build-system"]["requires"]) <= set(output["requirements"]["host"])
        run = spelt([*project["dependencies"], f"python{project['requires-python']}"])
        assert run == set(output["requirements"]["run"])


@pytest.mark.parametrize("platform", ["linux-64", "osx-arm64"])
def test_who_links_to_the_library_asks_for_its_minor_version(platform):
    (library,) = outputs(platform)["libkvcache"].values()
    (pin,) = library["requirements"]["run_exports"]["weak"]
    assert pin["pin_subpackage"]["name"] == "libkvcache"
    assert pin["pin_subpackage"]["upper_bound"] == "x.x"
