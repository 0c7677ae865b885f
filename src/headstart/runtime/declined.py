"""The refusal of an implementation; apart from dispatch, so that it is known before torch is."""


class Declined(NotImplementedError):
    """An implementation (or all of them) cannot run a call; the message says why."""
