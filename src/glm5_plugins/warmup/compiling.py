"""The process that compiles one module: `python -m glm5_plugins.warmup.compiling FAMILY GETTER ARGUMENTS`.

A process of its own, because a compiler run must be ended as a whole, and its output kept apart. It ends with the
one that started it: standard input is a pipe that closes then.
"""

from __future__ import annotations

import ast
import os
import signal
import sys
import threading

from glm5_plugins.warmup import specs
from glm5_plugins.warmup.needs import Module


def main(argv: list[str]) -> None:
    """Build one module into FlashInfer's cache; the compiler writes to standard output."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    specs.assume_cuda_build()
    family, getter, arguments = argv
    artifact = specs.find(Module(family, getter, tuple(ast.literal_eval(arguments))))
    artifact.spec.build(True, need_lock=True)  # verbose, and under FlashInfer's own lock


def _end_with_parent() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGTERM)  # ninja, in this group, then ends its compilers, which are in groups of their own


if __name__ == "__main__":
    main(sys.argv[1:])
