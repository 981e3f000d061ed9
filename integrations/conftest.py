import sys
from pathlib import Path

pytest_plugins = ["support.plugin"]

# Modules that the tests of an integration share, and its benchmarks.
sys.path += [str(path) for part in ("tests", "bench") for path in Path(__file__).parent.glob(f"*/{part}")]
