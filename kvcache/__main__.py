"""Run the command ``kvcache`` as ``python -m kvcache``."""

from _kvcache_command import main

if __name__ == "__main__":
    main()
