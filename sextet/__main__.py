"""The `sextet` command; Ctrl-C is handled from its first moment, before the imports that take a second."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """See sextet.cli."""
    try:
        from sextet.cli import run_command

        code = run_command()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
