"""Errors that concern more than one rank."""


class PeerTimeoutError(TimeoutError):
    """A peer's word did not come within the deadline. The message says who is missing, and where.

    Attributes:
        call_number: which phase of this object, from 1.
        missing: ranks whose words had not come.
    """

    def __init__(self, message: str, *, call_number: int, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.call_number = call_number
        self.missing = missing


class PeerError(RuntimeError):
    """Another rank's call was wrong, so nothing moved on any. The message says whose, and why."""
