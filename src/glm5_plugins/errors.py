"""The errors of the layer: each says what is wrong and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean 'x'?` for the nearest known name, or the list of known names."""
    choices = sorted(known)
    folded = {choice.casefold().replace("-", "_"): choice for choice in choices}
    near = get_close_matches(name.casefold().replace("-", "_"), folded, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {folded[near[0]]!r}?"
    return f"Known: {', '.join(choices) or 'none'}."
