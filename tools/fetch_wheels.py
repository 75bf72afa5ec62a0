"""Download SGLang and FlashInfer wheels for the contract tests, and keep the Python files in them.

    python tools/fetch_wheels.py all
    python tools/fetch_wheels.py 0.5.9 0.5.23

`all` is every version that the package index has, from the oldest supported on: 1.5 GB once. Versions of SGLang bring
the FlashInfer that each asks for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from glm5_plugins import wheels
from glm5_plugins.errors import Glm5Error


def _wanted(versions: list[str]) -> Iterator[tuple[str, str]]:
    if versions == ["all"]:
        yield from ((name, version) for name in wheels.OLDEST for version in wheels.listed(name))
        return
    for version in versions:
        yield "sglang", version
        pinned = wheels.fetch("sglang", version).pins.get("flashinfer-python")
        if pinned is not None:
            yield "flashinfer-python", pinned


def main(versions: list[str]) -> int:
    """Fetch each release in turn."""
    try:
        for name, version in _wanted(versions):
            at_hand = any(release.version == version for release in wheels.cached(name))
            print(f"{name} {version}: {'at hand' if at_hand else 'fetching'}", flush=True)
            try:
                wheels.fetch(name, version)
            except wheels.NoWheel as error:
                if versions != ["all"]:
                    raise
                print(error.what)
    except Glm5Error as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
