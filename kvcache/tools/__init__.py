"""The parts of the command ``kvcache``: memory plans, benchmarks, and the peers that the benchmarks time."""
