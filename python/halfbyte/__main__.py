"""The command line tool `halfbyte`, which the package brings: this process becomes it."""

import os
import sys
from pathlib import Path

from . import _core


def main() -> None:
    tool = Path(_core.__file__).parent / "bin" / "halfbyte"
    os.execv(tool, ["halfbyte", *sys.argv[1:]])


if __name__ == "__main__":
    main()
