"""Runs a command that must not outlive the process that started it: `python -IS guard.py ninja …`.

Standard input is a pipe that closes when that process ends, however it ends. Run as a file, by a Python without site
packages: it is there in a moment, and knows nothing of this package.
"""

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """Run the command to its end, in this process group."""
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return command.wait()


def _end_with_parent() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGTERM)  # ninja passes it on to its compilers, which are in groups of their own


if __name__ == "__main__":
    sys.exit(main())
