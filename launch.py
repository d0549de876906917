"""Start Quorum: `python launch.py` opens the chat; `python launch.py --help` lists what else there is."""

import sys

from app.cli import main

if __name__ == "__main__":
    sys.exit(main())
