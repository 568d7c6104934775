"""What every strategy is: a generator that yields widths to score and is sent their scores.

It yields widths (n, L) and gets scores (n,) back, NaN where scoring failed; it ends when it has no more
to ask. The same widths may be asked for again, which costs nothing. A strategy knows nothing of stores,
processes or bars, and given the same scores it asks for the same widths: that makes a search resumable.
"""

from __future__ import annotations

from collections.abc import Generator

from bcnet.space.widths import Floats, Widths

Strategy = Generator[Widths, Floats, None]
