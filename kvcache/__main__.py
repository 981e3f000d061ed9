"""Run the command ``kvcache`` as ``python -m kvcache``."""

from kvcache.tools.cli import main

if __name__ == "__main__":
    main()
