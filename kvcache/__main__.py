"""The command ``kvcache``, also as ``python -m kvcache``."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Load the command and run it. Ctrl-C while it loads exits with 130, as it does while the command runs."""
    try:
        from kvcache.tools import cli
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if sys.argv[1:] != ["selftest"]:
            sys.exit(f"kvcache: there is no module {error.name}; run: pip install 'kvcache[cli]'")
        from kvcache.tools import selftest, terminal  # need NumPy alone

        terminal.run(selftest.main)  # which exits
    cli.main()


if __name__ == "__main__":
    main()
