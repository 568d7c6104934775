"""The one exception bcnet raises for a mistake of its user.

Its message is one sentence that names the cause and the way out; the command line prints it
and exits with code 2.
"""


class BcnetError(ValueError):
    """A mistake the user can mend; the message says how."""
