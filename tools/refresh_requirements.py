"""Pin everything that a real SGLang server on a CPU needs, one file per SGLang version.

    python tools/refresh_requirements.py [VERSION …]

Lets pip resolve without installing, for the running Python, then writes
tests/servers/requirements/sglang-VERSION.txt. SGLang and FlashInfer take no part in the resolution:
their own pins ask for CUDA builds. Run the server tests of a version before committing its file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "tests" / "servers" / "requirements"

# Per SGLang: the FlashInfer that its wheel names, and the requirements that differ between versions.
VERSIONS: dict[str, tuple[str, list[str]]] = {
    "0.5.9": (
        "0.6.3",
        ["transformers==4.57.1", "apache-tvm-ffi>=0.1.5,<0.2", "xgrammar==0.1.27", "openai==2.6.1"],
    ),
    "0.5.11": (
        "0.6.8.post1",
        ["transformers==5.6.0", "apache-tvm-ffi>=0.1.5,<0.2", "xgrammar==0.1.32", "openai==2.6.1"],
    ),
    "0.5.12": (
        "0.6.11.post1",
        ["transformers==5.6.0", "apache-tvm-ffi==0.1.9", "xgrammar==0.2.0", "openai==2.6.1"],
    ),
    "0.5.14": (
        "0.6.12",
        ["transformers==5.8.1", "apache-tvm-ffi==0.1.9", "xgrammar==0.2.1", "openai==2.6.1"],
    ),
    "0.5.19": (
        "0.6.18",
        ["transformers==5.12.1", "apache-tvm-ffi==0.1.11", "xgrammar==0.2.1", "openai==2.6.1"],
    ),
    "0.5.23": (
        "0.7.2",
        ["transformers==5.19.0", "apache-tvm-ffi==0.1.11", "xgrammar==0.2.7", "openai==2.8.0"],
    ),
}
# FlashInfer asks for a loaded libcudart at import; tests/support/server.py preloads this one.
NEED_LIBCUDART = {"0.5.9", "0.5.11", "0.5.12", "0.5.14"}

# fmt: off
COMMON = [
    "torch==2.13.0", "triton", "numpy", "scipy", "einops", "compressed-tensors==0.18.0", "gguf", "sentencepiece",
    "soundfile==0.13.1", "pillow", "fastapi", "starlette", "uvicorn>=0.51", "uvloop", "aiohttp", "requests",
    "python-multipart", "prometheus-client", "pyzmq>=25.1.2", "IPython", "dill", "jsonschema", "msgspec",
    "nvidia-ml-py", "orjson", "packaging", "partial_json_parser", "psutil", "pybase64", "pydantic", "setproctitle",
    "setuptools", "tqdm",
]
# fmt: on
OURS = ["pluggy", "pydantic-settings", "pytest"]

HEADER = """\
# Everything for a real SGLang {version} server on a CPU, pinned. Written by tools/refresh_requirements.py
# on Python {python}. Install with `pip install --no-deps -r`: the list is complete, and the CUDA packages
# that SGLang and FlashInfer ask for are left out on purpose. torch must be a CPU build: where pip's index
# offers another, point PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels.
"""


def resolve(requirements: list[str]) -> dict[str, str]:
    """Names and versions that pip would install for these requirements."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*command, "--report", str(report), *requirements], check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"].partition("+")[0] for item in found}


def main(versions: list[str]) -> int:
    """Write the requirement file of each version."""
    if unknown := [version for version in versions if version not in VERSIONS]:
        print(f"no entry for {', '.join(unknown)}: known are {', '.join(VERSIONS)}", file=sys.stderr)
        return 2
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    for version in versions or VERSIONS:
        flashinfer, requirements = VERSIONS[version]
        if version in NEED_LIBCUDART:
            requirements = [*requirements, "nvidia-cuda-runtime==13.0.96"]
        pins = resolve([*COMMON, *requirements, *OURS]) | {"sglang": version, "flashinfer-python": flashinfer}
        path = FOLDER / f"sglang-{version}.txt"
        lines = [f"{name}=={pins[name]}" for name in sorted(pins, key=str.lower)]
        path.write_text(HEADER.format(version=version, python=python) + "\n".join(lines) + "\n", encoding="utf-8")
        print(f"{path}: {len(lines)} pins")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
