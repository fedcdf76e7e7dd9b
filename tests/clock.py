"""A clock for tests, set by hand."""


class Clock:
    """Stands in for `perf_counter` or `monotonic`.

    Args:
        now: seconds that it shows first.
    """

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
