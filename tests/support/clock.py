"""A clock that a test moves, in place of a monotonic one."""


class Clock:
    """Stands still until `pass_s`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
