"""The one exception bcnet raises for a mistake of its user.

Its message is one sentence that names the cause and the way out; the command line prints it
and exits with code 2.
"""

import difflib
from collections.abc import Iterable


class BcnetError(ValueError):
    """A mistake that the user can correct; the message says how."""


class NotFinite(BcnetError):
    """A loss, a score or weights became infinite or NaN."""


def did_you_mean(name: object, known: Iterable[str], most: int = 1) -> str:
    """``did you mean 'this' or 'that'?`` of the ``known`` names nearest to ``name``; empty where none is near."""
    by_lower = {key.lower(): key for key in known}
    near = difflib.get_close_matches(str(name).lower()[:80], by_lower, most, 0.5)
    return f"did you mean {' or '.join(repr(by_lower[key]) for key in near)}?" if near else ""


def first_line(error: BaseException) -> str:
    """The first line of what an error of another package says, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160].rstrip(".")
