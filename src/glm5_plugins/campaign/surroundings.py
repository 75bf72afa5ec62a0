"""What a campaign ran on: versions of the server's environment, and the machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from glm5_plugins.errors import ConfigurationError

_DISTRIBUTIONS = ("sglang", "torch", "flashinfer-python", "sglang-kernel", "sgl-kernel", "transformers", "glm5-plugins")
_ASK = """
import json, platform, sys
from importlib import metadata
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions(python: str, env: Mapping[str, str]) -> dict[str, str]:
    """The versions that the server's interpreter finds in the server's environment.

    Raises:
        ConfigurationError: The interpreter does not run, or has no SGLang.
    """
    try:
        done = subprocess.run(
            [python, "-c", _ASK, *_DISTRIBUTIONS],
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigurationError(
            f"The interpreter {python} of [server] cannot be asked: {error}.", "Correct python = ... of [server]."
        ) from None
    if "sglang" not in found:
        raise ConfigurationError(
            f"The interpreter {python} of [server] has no sglang.",
            "Run the campaign from SGLang's environment, or set python = ... of [server].",
        )
    return found


def machine() -> dict[str, str]:
    """The host, its cores and its GPUs."""
    found = {"host": platform.node(), "cores": str(os.cpu_count()), "gpus": "none"}
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        found["gpus"] = "; ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names)) or "none"
    return found
