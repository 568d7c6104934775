"""``bcnet`` whose second process is always late to look at what is done, for tests/training/test_distributed.py."""

from __future__ import annotations

import os
import time

from bcnet.__main__ import main
from bcnet.run.folder import RunFolder

look = RunFolder.done


def late(self: RunFolder, name: str) -> bool:
    if os.environ["RANK"] != "0":
        time.sleep(3.0 if name in ("trace", "compare", "export", "report") else 0.2)
    return look(self, name)


if __name__ == "__main__":
    RunFolder.done = late  # type: ignore[method-assign]
    main()
