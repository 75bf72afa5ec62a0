"""One rank of a server, as far as modules go: make them ready, load them, say what became of them as JSON.

    python -m tests.warmup.rank --timeout 60 FAMILY GETTER ARGUMENTS

A CPU machine has no driver: an empty libcuda.so.1 stands in where a module asks for it when it is loaded.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from pathlib import Path

from glm5_plugins.errors import Glm5Error
from glm5_plugins.warmup import specs
from glm5_plugins.warmup.building import Builder
from glm5_plugins.warmup.needs import Module


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("family")
    parser.add_argument("getter")
    parser.add_argument("arguments")
    given = parser.parse_args()
    specs.assume_cuda_build()
    artifact = specs.find(Module(given.family, given.getter, ast.literal_eval(given.arguments)))
    builder = Builder(
        specs.cache_folder(),
        lambda text: print(f"{os.getpid()}: {text}", file=sys.stderr, flush=True),
        timeout_s=given.timeout,
    )
    try:
        how = builder.make_ready([artifact])
        artifact.load()
    except Glm5Error as error:
        print(error, file=sys.stderr)
        return 1
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if artifact.name + ".so" in line}
    library = artifact.library.stat()
    print(json.dumps({"how": how[artifact.name], "mapped": sorted(mapped), "inode": library.st_ino}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
