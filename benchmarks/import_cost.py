"""What the layer costs a process: nothing without GLM5_* variables, and with plugins little beyond pydantic's import.

Fresh interpreters, in turn, each timing itself from inside; medians of many. The limits are the project's own: under
2 ms without a variable, under 60 ms with plugins beyond what `import pydantic` costs anyway (SGLang imports it too).

    python benchmarks/import_cost.py [--runs 21] [--check]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version

IDLE = """
import os, time
began = time.perf_counter()
import glm5_plugins
glm5_plugins.register()
print((time.perf_counter() - began) * 1000)
"""
WITH_PLUGINS = """
import os, time
import pydantic
from pydantic import BaseModel, TypeAdapter, ValidationError, field_validator
class Model(BaseModel):
    value: int = 0
Model()
began = time.perf_counter()
import glm5_plugins
glm5_plugins.register()
print((time.perf_counter() - began) * 1000)
"""
PYDANTIC = """
import time
began = time.perf_counter()
from pydantic import BaseModel
class Model(BaseModel):
    value: int = 0
Model()
print((time.perf_counter() - began) * 1000)
"""
ARMS = {
    "no GLM5_* variable": (IDLE, {}, 2.0),
    "GLM5_PLUGINS=cuda_version,no_fullgraph, beyond pydantic": (
        WITH_PLUGINS,
        {"GLM5_PLUGINS": "cuda_version,no_fullgraph"},
        60.0,
    ),
    "pydantic alone, for comparison": (PYDANTIC, {}, None),
}


def measure(code: str, env: dict[str, str]) -> float:
    """Run code in a fresh interpreter and return the milliseconds it prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GLM5_")}
    done = subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--check", action="store_true", help="exit 1 when a median is over its limit")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    for run in range(arguments.runs + 1):
        for name, (code, env, _) in ARMS.items():
            taken = measure(code, env)
            if run:  # the first fills the caches
                times[name].append(taken)
    print(f"Python {platform.python_version()}, pydantic {version('pydantic')}, {os.cpu_count()} processors,", end=" ")
    print(f"{datetime.date.today().isoformat()}, {arguments.runs} runs in turn\n")
    print("| process | median ms | min | max | limit |\n|---|---|---|---|---|")
    over = False
    for name, (_, _, limit) in ARMS.items():
        median = statistics.median(times[name])
        over |= limit is not None and median > limit
        print(f"| {name} | {median:.2f} | {min(times[name]):.2f} | {max(times[name]):.2f} | {limit or '-'} |")
    print(json.dumps({name: statistics.median(values) for name, values in times.items()}), file=sys.stderr)
    return int(over and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
