"""The errors of the layer: each says what is wrong and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from heapq import nlargest
from itertools import pairwise

_MOST = 10
_SHOWN_BY = (
    ("--", "`python -m sglang.launch_server --help`"),
    ("GLM5_", "`glm5-plugins env`"),
    ("", "`glm5-plugins list`"),
)


class Glm5Error(Exception):
    """Something the layer refuses.

    Args:
        what: One sentence that names the variable, plugin or target, and the value.
        mend: One sentence that says what to do about it.
    """

    def __init__(self, what: str, mend: str = "") -> None:
        self.what = _on_one_line(what)
        self.mend = _on_one_line(mend)
        super().__init__(self.what, self.mend)

    def __str__(self) -> str:
        return f"{self.what}\n  {self.mend}" if self.mend else self.what


class ConfigurationError(Glm5Error):
    """A setting, plugin or patch is declared wrongly; the launch always stops."""


class NotInForce(Glm5Error):
    """A requested plugin cannot do its job in this process."""


class PluginError(Glm5Error):
    """A plugin's own hook raised; SGLang's errors never become one."""


class NotApplicable(Exception):
    """Raised by a patch's `using` when there is nothing here for it to do; the text is the reason."""


def _on_one_line(text: str) -> str:
    """Spell line breaks out: a value of the user's, or an error of others, may hold some."""
    return "".join(repr(letter)[1:-1] if letter.splitlines() == [""] else letter for letter in text)


def stop(error: Glm5Error) -> SystemExit:
    """Turn an error into the exit that SGLang's plugin loader does not swallow; the caller raises it."""
    return SystemExit(f"glm5-plugins: {error}")


def did_you_mean(name: str, known: Iterable[str], shown_by: str = "") -> str:
    """Return `Did you mean 'x'?` for the nearest known name, or the known names, ten at most.

    Args:
        name: What is not known.
        known: What is.
        shown_by: The command that shows all known names; by default the one for flags, variables or plugins.
    """
    choices = sorted(known)
    spelled = {_fold(choice): choice for choice in choices}
    wanted, pairs = _fold(name), _pairs(_fold(name))

    def shared(other: str) -> float:
        return len(pairs & _pairs(other)) / (len(pairs) + len(_pairs(other)))

    # Letter by letter, one name takes 50 µs, and there are hundreds of flags.
    near = get_close_matches(wanted, nlargest(_MOST, spelled, key=shared), n=1, cutoff=0.6)
    if near:
        return f"Did you mean {spelled[near[0]]!r}?"
    more = len(choices) - _MOST
    if more <= 0:
        return f"Known: {', '.join(choices) or 'none'}."
    shown_by = shown_by or next(command for start, command in _SHOWN_BY if choices[0].startswith(start))
    return f"Known: {', '.join(choices[:_MOST])} and {more} more, which {shown_by} shows."


def _fold(name: str) -> str:
    return name.casefold().replace("-", "_")


@lru_cache(maxsize=1024)
def _pairs(name: str) -> frozenset[str]:
    """The pairs of letters side by side, those at both ends among them."""
    return frozenset(map("".join, pairwise(f" {name} ")))
