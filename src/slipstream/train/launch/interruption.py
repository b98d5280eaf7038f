"""How a launcher that was told to stop says so. Loads nothing: mistakes are told at once."""


class Interrupted(Exception):
    """The launcher was told to stop by a signal, and its ranks have ended.

    Its text says what the ranks saved. Not a SlipstreamError: stopping is no failure.
    """

    def __init__(self, signal_number: int, text: str) -> None:
        super().__init__(text)
        self.signal_number = signal_number
