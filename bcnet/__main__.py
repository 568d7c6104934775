"""``bcnet`` and ``python -m bcnet``: the command line, whose imports a Ctrl-C may interrupt, too."""

import sys


def main() -> None:
    try:
        from bcnet.cli.console import main as command_line

        command_line()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
