"""examples/rust, where cargo is installed: the binding's own tests, its style and its format."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import kvcache

PACKAGE = Path(__file__).parents[2] / "examples" / "rust"
TIMEOUT = 1200


def runs(*command: str) -> bool:
    """Return whether a command exists, and is no stub that asks to install it."""
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


for tool in ("cargo", "cc"):
    if not runs(tool, "--version"):
        pytest.skip(f"there is no {tool} here", allow_module_level=True)


def cargo(target: Path, *arguments: str, **environment: str) -> None:
    """Run cargo, without a network, and with what it makes in a folder of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "KVCACHE_LIB_DIR"}
    done = subprocess.run(
        ["cargo", *arguments],
        cwd=PACKAGE,
        env=inherited | {"CARGO_TARGET_DIR": str(target), "CARGO_NET_OFFLINE": "true"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def installed() -> dict[str, str]:
    """Name the library of the package under test; in .ci/full nothing, so that build.rs compiles the core."""
    if os.environ.get("HYPOTHESIS_PROFILE") == "full":
        return {}
    return {"KVCACHE_LIB_DIR": str(Path(kvcache.get_library()).parent)}


def test_binding(tmp_path: Path, installed: dict[str, str]) -> None:
    """cargo test passes: declarations match the header, the safe layer and its example work."""
    cargo(tmp_path, "test", "--locked", **installed)


def test_clippy(tmp_path: Path, installed: dict[str, str]) -> None:
    if not runs("cargo", "clippy", "--version"):
        pytest.skip("there is no cargo clippy here")
    cargo(tmp_path, "clippy", "--all-targets", "--", "-D", "warnings", **installed)


def test_format(tmp_path: Path) -> None:
    if not runs("cargo", "fmt", "--version"):
        pytest.skip("there is no cargo fmt here")
    cargo(tmp_path, "fmt", "--check")
