"""The flags of every SGLang version, from a table made of their own parsers; SGLang need not be installed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NoReturn

from packaging.version import InvalidVersion, Version

from glm5_plugins.arguments import field_of
from glm5_plugins.errors import Glm5Error

if TYPE_CHECKING:
    from glm5_plugins.rules import Launch

# What a flag that is gone is called now, where the parser of no version says it.
RENAMED = {
    "--nsa-prefill-backend": "--dsa-prefill-backend",
    "--nsa-decode-backend": "--dsa-decode-backend",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--enable-piecewise-cuda-graph": "--cuda-graph-backend-prefill tc_piecewise",
    "--enforce-piecewise-cuda-graph": "--cuda-graph-backend-prefill tc_piecewise",
    "--disable-piecewise-cuda-graph": "--cuda-graph-backend-prefill disabled",
    "--enable-breakable-cuda-graph": "--cuda-graph-backend-prefill breakable",
    "--piecewise-cuda-graph-max-tokens": "--cuda-graph-max-bs-prefill",
    "--piecewise-cuda-graph-compiler": "--cuda-graph-tc-compiler",
    "--enable-flashinfer-autotune": "nothing: it is on unless --disable-flashinfer-autotune is given",
    "--fp4-gemm-runner-backend": "--fp4-gemm-backend",
    "--enable-ep-moe": "--ep-size",
    "--enable-flashinfer-cutlass-moe": "--moe-runner-backend flashinfer_cutlass",
    "--enable-flashinfer-trtllm-moe": "--moe-runner-backend flashinfer_trtllm",
    "--enable-deepep-moe": "--moe-a2a-backend deepep",
}

# Fields that had another name: new, old, the version that has the new one.
_FIELDS = (
    ("dsa_prefill_backend", "nsa_prefill_backend", ">=0.5.13"),
    ("dsa_decode_backend", "nsa_decode_backend", ">=0.5.13"),
    ("cuda_graph_max_bs_decode", "cuda_graph_max_bs", ">=0.5.14"),
)

# Values and flags of well-known forks, which no SGLang wheel up to 0.5.23 accepts. Published launches have them:
# https://github.com/voipmonitor/rtx6kpro (inference-engines/sglang.md, models/glm5.md), of https://github.com/lukealonso/sglang.
FORK_VALUES = {"b12x": "a fork of SGLang for RTX PRO 6000"}
FORK_FLAGS = {
    "--enable-pcie-oneshot-allreduce": "a fork of SGLang for RTX PRO 6000",
    "--enable-pcie-oneshot-allreduce-fusion": "a fork of SGLang for RTX PRO 6000",
    "--pcie-oneshot-allreduce-max-size": "a fork of SGLang for RTX PRO 6000",
}


class FlagError(Glm5Error):
    """A command line that the parser of a version does not take."""


@dataclass(frozen=True)
class Flag:
    """One flag in a stretch of versions in which it does not change.

    Args:
        options: Its spellings.
        field: The field of `ServerArgs` it fills.
        kind: `value`, `switch` (no value), `boolean` (`--x` and `--no-x`) or `append`.
        nargs: As argparse has it; None for one value.
        const: What a switch gives.
        type: `int` or `float` where the value is a number.
        choices: The values it takes; None for any.
        new: What it is called now, where it is on its way out.
        gone: Why it is refused, where it is there only to say so.
        required: Whether a launch must give it.
        first: Index of the first version.
        last: Index of the last version.
    """

    options: tuple[str, ...]
    field: str
    kind: str
    nargs: Any
    const: Any
    type: str | None
    choices: tuple[str, ...] | None
    new: str | None
    gone: str | None
    required: bool
    first: int
    last: int

    @property
    def versions(self) -> str:
        """The stretch, for a person."""
        names = versions()
        if self.last == len(names) - 1:
            return f"from {names[self.first]}"
        first, last = names[self.first], names[self.last]
        return f"in {first}" if first == last else f"from {first} to {last}"


@cache
def _table() -> tuple[tuple[str, ...], tuple[Flag, ...]]:
    document = json.loads(files("glm5_plugins").joinpath("flags.json").read_text(encoding="utf-8"))
    return tuple(document["versions"]), tuple(map(_flag, document["flags"]))


def _flag(row: dict[str, Any]) -> Flag:
    kind = row.get("kind") or ("switch" if row.get("nargs") == 0 else "value")
    return Flag(
        tuple(row["options"]),
        field_of(row["dest"]),
        kind,
        row.get("nargs"),
        row.get("const"),
        row.get("type"),
        None if row.get("choices") is None else tuple(row["choices"]),
        row.get("new"),
        row.get("gone"),
        row.get("required", False),
        row["from"],
        row["to"],
    )


def versions() -> tuple[str, ...]:
    """The SGLang versions that the table has, oldest first."""
    return _table()[0]


def nearest(version: str | None) -> str:
    """The newest version of the table that is not newer than `version`; the newest of all for one it cannot place."""
    try:
        wanted = None if version is None else Version(Version(version).public)
    except InvalidVersion:
        wanted = None
    if wanted is None or not any(wanted.release):
        return versions()[-1]
    older = [one for one in versions() if Version(one) <= wanted]
    return older[-1] if older else versions()[0]


def is_version(text: str) -> bool:
    """Whether a text is a version, known or not."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def of(version: str) -> list[Flag]:
    """The flags of a version of the table."""
    index = versions().index(version)
    return [flag for flag in _table()[1] if flag.first <= index <= flag.last]


def with_option(option: str) -> Iterator[Flag]:
    """The flags of any version that have this spelling, oldest first."""
    found = [flag for flag in _table()[1] if option in flag.options]
    return iter(sorted(found, key=lambda flag: flag.first))


def field_in(field: str, launch: Launch) -> str:
    """What a field of the newest version is called in the version of a launch."""
    for new, old, since in _FIELDS:
        if field == new and not launch.is_sglang(since):
            return old
    return field


def parser_of(version: str) -> argparse.ArgumentParser:
    """A parser with the flags of a version that takes values as text and lets any value through.

    It understands a command line as SGLang's own: prefixes, `--flag=value`, aliases. It raises `FlagError` where
    SGLang's would end the process.
    """
    parser = _Parser(prog="sglang", add_help=False)
    for flag in of(version):
        destination = flag.field
        if flag.kind == "boolean":
            yes = [option for option in flag.options if not option.startswith("--no-")]
            parser.add_argument(*yes, dest=destination, action=argparse.BooleanOptionalAction)
        elif flag.kind == "switch":
            parser.add_argument(*flag.options, dest=destination, action="store_const", const=flag.const)
        elif flag.kind == "append":
            parser.add_argument(*flag.options, dest=destination, action="append", nargs=flag.nargs)
        else:
            parser.add_argument(*flag.options, dest=destination, nargs=flag.nargs)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(f"The command line is not understood: {message}.", "Correct that flag.")


def behind_serve(words: Sequence[str], version: str) -> list[str]:
    """What `sglang serve` of a version hands to its parser: without the flag of its own, and the model behind one."""
    argv = list(words)
    at = next((i for i, word in enumerate(argv) if word.partition("=")[0] == "--model-type"), None)
    if at is not None and Version(version) >= Version("0.5.10"):
        del argv[at : at + (1 if "=" in argv[at] else 2)]
    if argv and not argv[0].startswith("-") and Version(version) >= Version("0.5.16"):
        argv.insert(0, "--model-path")
    return argv


def stretches(flags: Sequence[Flag]) -> str:
    """In which versions one of these flags exists, for a person."""
    joined: list[list[int]] = []
    for flag in sorted(flags, key=lambda flag: flag.first):
        if joined and flag.first <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], flag.last)
        else:
            joined.append([flag.first, flag.last])
    names = versions()
    words = [
        f"from {names[first]}" if last == len(names) - 1 else f"from {names[first]} to {names[last]}"
        for first, last in joined
    ]
    return " and ".join(words)
