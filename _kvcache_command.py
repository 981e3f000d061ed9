"""The command ``kvcache``: a module beside the package, so that it meets an interrupt while the package is imported."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command and exit: 0, 2 after a mistake, 130 after an interrupt."""
    try:
        from kvcache.tools.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
