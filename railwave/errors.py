"""Errors that concern more than one rank."""


class PeerTimeoutError(TimeoutError):
    """A peer's word did not come within the deadline. The message says who is missing, and where.

    Attributes:
        call_number: which phase of this object, from 1.
        missing: ranks that neither finished the phase nor said within a second that they wait too.
    """

    # With defaults, since pickle makes it from its message, then adds the rest.
    def __init__(
        self, message: str, *, call_number: int = 0, missing: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.call_number = call_number
        self.missing = missing


class PeerError(RuntimeError):
    """Another rank's call was wrong, or calls differ; nothing moved. The message says whose."""


class ReceiveOverflowError(RuntimeError):
    """More rows would come to a rank than max_recv_rows: nothing moved, on any rank.

    Attributes:
        num_rows: the most rows that one rank would have received.
    """

    def __init__(self, message: str, *, num_rows: int = 0) -> None:
        super().__init__(message)
        self.num_rows = num_rows
