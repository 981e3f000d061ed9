import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

import hypothesis
import pytest
from support.compiling import build_core

# What is tested is what was installed. `python -m pytest`, and `python -c` in a test, would put the checkout first,
# where kvcache/ has no compiled half unless it was built in place.
ROOT = Path(__file__).resolve().parents[1]
os.environ["PYTHONSAFEPATH"] = "1"
if not any((ROOT / "kvcache").glob("_core.*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("full", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """A function from C sources to a program of them and the core, which is compiled once."""
    return build_core(tmp_path_factory.mktemp("core"))


def pytest_report_header():
    return f"kvcache: {importlib.util.find_spec('kvcache').origin}"


def pytest_configure():
    """With KVCACHE_TEST_INSTALLED=1, as .ci/run sets it, only what pip installed may be tested."""
    if os.environ.get("KVCACHE_TEST_INSTALLED") == "1":
        import kvcache

        installed = Path(sysconfig.get_path("platlib")).resolve()
        if installed not in Path(kvcache.__file__).resolve().parents:
            raise pytest.UsageError(f"kvcache comes from {kvcache.__file__}, not from {installed}")
