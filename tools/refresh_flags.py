"""Write src/glm5_plugins/flags.json: every flag of every SGLang version, as its own parser has it.

    python tools/refresh_flags.py FOLDER

FOLDER holds unpacked SGLang wheels, one folder per version, named sglang-VERSION or sg-VERSION:

    pip download --no-deps -d wheels sglang==0.5.23 && python -m zipfile -e wheels/sglang-0.5.23-*.whl FOLDER/sg-0.5.23

Run it with a Python that has the newest SGLang of the table and what it imports (`tox -e server-sglang0.5.23` makes
one): every version is imported there, in a process of its own, and asked for its parser.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "src" / "glm5_plugins" / "flags.json"
STANDINS = ROOT / "tests" / "support" / "standins"

ASK = """
import argparse, json, sys
from transformers.models.auto import configuration_auto
mapping = configuration_auto._LazyConfigMapping
register = mapping.register
# Older versions register model types that the newest transformers knows by itself.
mapping.register = lambda self, key, value, exist_ok=False: register(self, key, value, True)
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)

def plain(value):
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return None
    return value

def row(action):
    found = {"options": action.option_strings, "dest": action.dest}
    if action.nargs is not None:
        found["nargs"] = action.nargs
    if isinstance(action, argparse.BooleanOptionalAction):
        found["kind"] = "boolean"
    elif isinstance(action, argparse._AppendAction):
        found["kind"] = "append"
    elif action.nargs == 0:
        found["const"] = plain(getattr(action, "const_value", None) or action.const or True)
    if action.type in (int, float):
        found["type"] = action.type.__name__
    if action.choices is not None:
        found["choices"] = sorted(map(str, action.choices))
    if action.required:
        found["required"] = True
    if getattr(action, "new_flag", None):
        found["new"] = action.new_flag
    if getattr(action, "error_message", None):
        found["gone"] = action.error_message
    return found

rows = [row(a) for a in parser._actions if a.option_strings and not isinstance(a, argparse._HelpAction)]
print("ROWS" + json.dumps(rows))
"""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Ask the SGLang in `folder` for its flags."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(STANDINS)]),
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    line = next((line for line in run.stdout.splitlines() if line.startswith("ROWS")), None)
    if line is None:
        raise SystemExit(f"{folder}: its parser could not be made:\n{run.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(line.removeprefix("ROWS"))
    return found


def merged(by_version: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """One row for each flag and stretch of versions in which it did not change."""
    versions = sorted(by_version, key=Version)
    open_rows: dict[str, dict[str, Any]] = {}
    table: list[dict[str, Any]] = []
    for index, version in enumerate(versions):
        for row in by_version[version]:
            key = json.dumps(row, sort_keys=True)
            known = open_rows.get(key)
            if known is not None and known["to"] == index - 1:
                known["to"] = index
            else:
                open_rows[key] = {**row, "from": index, "to": index}
                table.append(open_rows[key])
    table.sort(key=lambda row: (row["options"], row["from"]))
    return {"versions": versions, "flags": table}


def main(argv: list[str]) -> int:
    """Write the table from all the versions in a folder."""
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    by_version = {}
    for folder in sorted(Path(argv[0]).iterdir()):
        name, _, version = folder.name.partition("-")
        if name in ("sg", "sglang") and (folder / "sglang" / "srt" / "server_args.py").is_file():
            by_version[version] = rows_of(folder)
            print(f"{version}: {len(by_version[version])} flags", flush=True)
    table = merged(by_version)
    lines = ",\n".join("    " + json.dumps(row, sort_keys=True, separators=(",", ":")) for row in table["flags"])
    versions = json.dumps(table["versions"])
    TABLE.write_text(f'{{\n  "versions": {versions},\n  "flags": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
    print(f"{TABLE}: {len(table['flags'])} rows, {TABLE.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
