"""What the swap-in counts, if it is given a tensor to count in."""

from __future__ import annotations

# Misses of one request in one call, by size: the largest number each bucket holds; None: any.
MISS_BUCKETS: tuple[int | None, ...] = (*((1 << k) - 1 for k in range(13)), None)

# Where each number stands: entries answered without a copy, rows copied, bytes copied, requests served (rows of the
# batch that are not padding), and from MISSES on how many of these requests fall in each bucket.
HITS, COPIES, BYTES, REQUESTS, MISSES = range(5)
COUNTERS = MISSES + len(MISS_BUCKETS)


def miss_bucket(misses: int) -> int:
    """The bucket of a request with that many misses."""
    return min(misses.bit_length(), len(MISS_BUCKETS) - 1)
