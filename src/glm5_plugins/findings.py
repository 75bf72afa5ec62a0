"""A finding: something about this machine or these settings that a person should know, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Something a person should know, and what to do about it.

    Args:
        level: An error would stop a launch or a build; a warning may spoil it; a note is for information.
        what: One sentence that names the variable, file or version, and the value.
        mend: One sentence that says what to do.
    """

    level: Literal["error", "warning", "note"]
    what: str
    mend: str = ""
