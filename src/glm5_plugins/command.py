"""A launch command as people type it: variables in front, quotes, line continuations, docker, `sglang serve`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from glm5_plugins.errors import Glm5Error

# What starts a server, behind a python or alone.
MODULES = ("sglang.launch_server", "dynamo.sglang", "sglang", "serve")
_ASSIGNMENT = re.compile(r"(?:-e|--env=)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_ENDS = re.compile(r"[;&|<>()]+")
_VERSION = re.compile(r"sglang(?:\[\w+\])?(?::v?|==)(\d+\.\d+\.\d+(?:\.post\d+)?)")
LARGEST = 256 * 1024
"""Characters of the longest command that is read."""


class CommandError(Glm5Error):
    """What was typed is no launch of a server."""


@dataclass(frozen=True)
class Command:
    """A launch, taken apart.

    Args:
        environment: Variables that are set in front of it, or handed into a container.
        front: The words up to the server's flags, such as `CUDA_VISIBLE_DEVICES=0 python -m sglang.launch_server`.
        flags: The words after.
        notes: What looks like a slip of the hand.
    """

    environment: dict[str, str]
    front: tuple[str, ...]
    flags: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def version(self) -> str | None:
        """The SGLang version that a container image or a pip command in front names."""
        found = [match[1] for word in self.front for match in [_VERSION.search(word)] if match is not None]
        return found[-1] if found else None

    @property
    def program(self) -> list[str]:
        """What to run, with the layer in front: SGLang up to 0.5.10 has no other way in that needs no set-up."""
        words = [word for word in self.front if _ASSIGNMENT.fullmatch(word) is None and word not in ("env", "--")]
        if not words:
            words = [sys.executable, "-m", "sglang.launch_server"]
        if words[-2:] == ["-m", "sglang.launch_server"]:
            words[-1:] = ["glm5_plugins.launch", "sglang.launch_server"]
        return [*words, *self.flags]

    @property
    def in_container(self) -> bool:
        """Whether docker or the like starts it."""
        return any(word.rpartition("/")[2] in ("docker", "podman", "nerdctl", "kubectl") for word in self.front)

    @property
    def module(self) -> str:
        """What starts the server: a module, or `sglang serve`; empty when only flags were typed."""
        words = [word for word in self.front if word.rpartition("/")[2] in (*MODULES, "launch_server.py")]
        return " ".join(words[-2:] if words[-1:] == ["serve"] else words[-1:])


def read(words: Sequence[str]) -> Command:
    """Take a command apart.

    Args:
        words: As a shell hands them over; or one text with everything, as copied from a page.

    Raises:
        CommandError: There is no launch of SGLang in it, or a quote is not closed.
    """
    if len(words) == 1 and (" " in words[0] or "\n" in words[0]):
        words = _split(words[0])
    notes = []
    kept = []
    for word in words:
        if word.strip() in ("", "\\") and word != "":
            notes.append("a backslash has something behind it: the line does not go on there")
        else:
            kept.append(word)
    start = _start(kept)
    environment = {}
    for word in kept[:start]:
        match = _ASSIGNMENT.fullmatch(word)
        if match is not None:
            environment[match[1]] = match[2]
    return Command(environment, tuple(kept[:start]), tuple(kept[start:]), tuple(dict.fromkeys(notes)))


def _split(text: str) -> list[str]:
    if len(text) > LARGEST:
        raise CommandError(f"The command is longer than {LARGEST} characters.", "Give the launch command alone.")
    continued = re.sub(r"\\\r?\n", " ", text)
    words = shlex.shlex(continued, posix=True, punctuation_chars=";&|<>()")
    words.whitespace_split = True
    words.commenters = ""
    try:
        found = list(words)
    except ValueError as error:
        raise CommandError(f"The command cannot be taken apart: {error}.", "Close the quote.") from None
    return _one_command(found)


def _one_command(words: list[str]) -> list[str]:
    """Keep what comes before the server, and of the rest up to the end of that command."""
    start = _start(words)
    end = next((i for i, word in enumerate(words) if i >= start and _ENDS.fullmatch(word)), len(words))
    if end < len(words) and end > start and words[end - 1] in ("1", "2") and ">" in words[end]:
        end -= 1  # `2>&1`
    return [word for word in words[:start] if not _ENDS.fullmatch(word)] + words[start:end]


def _start(words: Sequence[str]) -> int:
    """Index of the first flag of the server."""
    for index, word in enumerate(words):
        behind = words[index - 1] if index else ""
        if word in ("sglang.launch_server", "dynamo.sglang") and behind in ("-m", "glm5_plugins.launch"):
            return index + 1
        if word == "serve" and behind.rpartition("/")[2] == "sglang":
            return index + 1
        if word.endswith("sglang/launch_server.py"):
            return index + 1
    if words and words[0].startswith("--"):
        return 1 if words[0] == "--" else 0
    what = " ".join(words)[:60] or "nothing"
    raise CommandError(
        f"There is no launch of SGLang in {what!r}.",
        "Give it whole: glm5-plugins check -- python -m sglang.launch_server --model-path …",
    )
