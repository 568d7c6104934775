"""``bcnet`` and ``python -m bcnet``: the command line, whose imports a Ctrl-C may interrupt, too."""

import os
import sys

KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
"""How many compiled kernels oneDNN keeps. Its 1,024 grow to gigabytes where every network has widths of its own; 64
train as fast, where 8 took a small network 1.6 times as long."""


def main() -> None:
    os.environ.setdefault(KERNELS, "64")  # read when torch first runs a convolution
    try:
        from bcnet.cli.console import main as command_line

        command_line()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
