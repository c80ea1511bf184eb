"""The one exception users are meant to see, and the help it gives."""

from collections.abc import Iterable
from difflib import get_close_matches


class HeadgateError(ValueError):
    """Bad input, in one sentence: the value given, what was expected, what to do.

    The command line prints it and exits with code 2; anything else is a bug and keeps its traceback.
    """


def suggestion(given: str, known: Iterable[str]) -> str:
    """The tail of a sentence about an unknown name: the closest known one, or all of them."""
    known = sorted(known)
    close = get_close_matches(given, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known are {', '.join(known)}" if known else "none are known"
