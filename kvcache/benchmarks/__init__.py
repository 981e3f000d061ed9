"""Benchmarks that are installed with the package, of this cache, of installed peers, and of your own cache.

``pytest --pyargs kvcache.benchmarks`` runs them. With ``-p kvcache.benchmarks``, pytest has options for other
implementations and sizes, which ``pytest -p kvcache.benchmarks --help`` lists. The benchmarks need pytest and
pytest-benchmark; importing this module needs neither.
"""

from kvcache.benchmarks.case import Case, Implementation
from kvcache.benchmarks.options import OPTIONS, pytest_addoption, pytest_configure

__all__ = ["OPTIONS", "Case", "Implementation", "pytest_addoption", "pytest_configure"]
