import os

# Set before NumPy is imported. Tests run side by side: threads that spin as they wait would take their processors.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.pop("COLUMNS", None)  # workers of pytest -n have it; lines are as long as they are in a pipe

import importlib.util
import signal
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path

import hypothesis
import pytest
from support import compiling

# A shell starts a job in the background with interrupts ignored, and whatever that starts inherits this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is tested is what was installed. `python -m pytest`, and `python -c` in a test, would put the checkout first,
# where kvcache/ has no compiled half unless it was built in place.
ROOT = Path(__file__).resolve().parents[2]
os.environ["PYTHONSAFEPATH"] = "1"
if not any((ROOT / "kvcache").glob("_core.*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

# The same examples each time, so that what fails is what was changed; `full` draws others.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.register_profile("full", deadline=None, derandomize=False, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

WORKSHOP = pytest.StashKey[Path]()


def pytest_addoption(parser):
    parser.addoption(
        "--slow", action="store_true", help="run tests marked slow, and the programs in C under sanitizers"
    )
    parser.addoption(
        "--full", action="store_true", help="run what --slow runs, and tests marked full, as .ci/full does"
    )


def part_of(config):
    """Return which part of the tests runs: quick, slow (with the quick ones), or full, which is all."""
    return "full" if config.option.full else "slow" if config.option.slow else "quick"


def pytest_configure(config):
    """With KVCACHE_TEST_INSTALLED=1, as .ci/run sets it, only what pip installed may be tested."""
    if os.environ.get("KVCACHE_TEST_INSTALLED") == "1":
        import kvcache

        installed = Path(sysconfig.get_path("platlib")).resolve()
        if installed not in Path(kvcache.__file__).resolve().parents:
            raise pytest.UsageError(f"kvcache comes from {kvcache.__file__}, not from {installed}")
    if not config.option.full:
        compiling.ENVIRONMENT["KVCACHE_TEST_PART"] = part_of(config)  # for tests/c/support/test.h
    if config.option.full or "KVCACHE_C_FLAGS" in os.environ:  # as in .ci/full: a quarter of the time
        compiling.ENVIRONMENT["ASAN_OPTIONS"] += ":detect_stack_use_after_return=1"  # the last one counts
    if hasattr(config, "workerinput"):
        config.stash[WORKSHOP] = Path(config.workerinput["workshop"])
    else:
        folder = tempfile.TemporaryDirectory(prefix="kvcache-")
        config.add_cleanup(folder.cleanup)
        config.stash[WORKSHOP] = Path(folder.name)


def pytest_runtest_setup(item):
    if item.get_closest_marker("hf"):
        pytest.importorskip("torch")
        with warnings.catch_warnings(action="ignore"):
            pytest.importorskip("transformers")


def pytest_report_header(config):
    which = {
        "quick": "without the slow tests, which --slow runs, too",
        "slow": "with the slow tests; --full runs more of the same",
        "full": "all tests",
    }[part_of(config)]
    return f"kvcache: {importlib.util.find_spec('kvcache').origin}, {which}"


# ---- which tests run, and where: alone, or in the workers of pytest -n


def pytest_collection_modifyitems(config, items):
    for item in items:
        if hasattr(item.getparent(pytest.Module).obj, "torch"):  # the whole file needs it
            item.add_marker("hf")
    marks = {"quick": ("slow", "full"), "slow": ("full",), "full": ()}[part_of(config)]
    left_out = {item for item in items if any(item.get_closest_marker(mark) for mark in marks)}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    return min(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(), 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each worker a file at a time, whose tests share servers; in the end single programs in C."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            return nodeid if test.startswith("test_program[") else file

    return ByFile(config, log)


# ---- what is built of C


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["workshop"] = str(node.config.stash[WORKSHOP])


@pytest.fixture(scope="session")
def workshop(pytestconfig):
    """The folder in which all workers build the core, and programs with it."""
    return compiling.Workshop(pytestconfig.stash[WORKSHOP])


@pytest.fixture(scope="session")
def build(workshop):
    """A function that builds a program of C sources and the core, once for all workers."""
    return workshop.build
