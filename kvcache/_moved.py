"""Import modules by their former names, with a warning.

A former name yields the module itself, not a copy: objects are the same under both names.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

__all__ = ["MOVED", "Finder"]

# Former names of modules in `kvcache`, and their present names. Remove this file in 0.3.
MOVED = {
    "bench": "tools.bench",
    "cli": "tools.cli",
    "config": "runtime",
    "files": "models.fields",
    "gguf": "models.gguf",
    "library": "runtime",
    "llama": "runner",
    "peers": "tools.peers",
    "plan": "tools.memory_plan",
    "reading": "models.reading",
    "shapes": "models.shapes",
    "tokens": "models.tokenizer",
    "turns": "tools.interleave",
    "weights": "models.weights",
}


class Finder:
    """Finds modules by their former names. It precedes other finders, which would load a second copy of a peer."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a spec for a former name, or for a module in a package of a former name; None for any other name."""
        if not name.startswith("kvcache."):
            return None
        former, dot, rest = name.removeprefix("kvcache.").partition(".")
        if former not in MOVED:
            return None
        present = f"kvcache.{MOVED[former]}{dot}{rest}"
        return ModuleSpec(name, cls(), loader_state=present)  # type: ignore[arg-type] # it has a loader's methods

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system make an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module of a former name by the module of the present name."""
        former, present = _names(module.__spec__)
        warnings.warn(_sentence(former, present), DeprecationWarning, stacklevel=2)
        sys.modules[former] = importlib.import_module(present)

    def get_code(self, name: str) -> CodeType:
        """Return a program that warns and runs the module of the present name, for ``python -m``."""
        former, present = _names(self.find_spec(name))
        program = f"""
import runpy, warnings
warnings.warn({_sentence(former, present)!r}, DeprecationWarning)
runpy.run_module({present!r}, run_name="__main__", alter_sys=True)
"""
        return compile(program, former, "exec")


def _names(spec: ModuleSpec | None) -> tuple[str, str]:
    """Return the former and the present name of a module that `Finder` found."""
    assert spec is not None
    return spec.name, spec.loader_state


def _sentence(former: str, present: str) -> str:
    return f"{former} is now {present}; the former name will be removed in kvcache 0.3"
