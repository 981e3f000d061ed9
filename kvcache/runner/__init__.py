"""Runs a Llama-family model in NumPy through a `KVCache`."""
