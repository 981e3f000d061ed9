"""What the command ``kvcache`` is made of: memory plans, benchmarks, and the peers that they time."""
