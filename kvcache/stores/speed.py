"""Measure how long reads take, by their bytes."""

from __future__ import annotations

import math
import time

__all__ = ["Speed"]


class Speed:
    """Fits seconds to the bytes of recent reads: a straight line by least squares, in which older reads fade."""

    def __init__(self) -> None:
        self.count = 0
        self.mean_bytes = self.mean_seconds = self.variance = self.covariance = 0.0
        self.last = -math.inf

    def add(self, nbytes: int, seconds: float) -> None:
        """Note a read."""
        self.count += 1
        weight = max(1 / self.count, 0.1)
        more_bytes, more_seconds = nbytes - self.mean_bytes, seconds - self.mean_seconds
        self.mean_bytes += weight * more_bytes
        self.mean_seconds += weight * more_seconds
        self.variance = (1 - weight) * (self.variance + weight * more_bytes**2)
        self.covariance = (1 - weight) * (self.covariance + weight * more_bytes * more_seconds)
        self.last = time.monotonic()

    def line(self) -> tuple[float, float] | None:
        """Return the seconds of an empty read, and the seconds of each byte; None if nothing was read."""
        if not self.count:
            return None
        if not self.mean_bytes:
            return self.mean_seconds, 0.0
        slope = self.mean_seconds / self.mean_bytes  # for reads of about one size it covers the latency, too
        if self.variance > (0.1 * self.mean_bytes) ** 2 and 0 < self.covariance < slope * self.variance:
            slope = self.covariance / self.variance
            return self.mean_seconds - slope * self.mean_bytes, slope
        return 0.0, slope
