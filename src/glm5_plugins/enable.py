"""The `.pth` line in site-packages through which the layer gets into every process of SGLang before 0.5.11."""

from __future__ import annotations

import os
import sysconfig
from contextlib import suppress
from pathlib import Path

from glm5_plugins.errors import ConfigurationError

# Python runs it still where the package is gone, as `pip uninstall` leaves it there.
LINE = (
    'import os; any(n.startswith("GLM5_") for n in os.environ)'
    ' and __import__("importlib.util").util.find_spec("glm5_plugins")'
    ' and __import__("glm5_plugins.autostart")\n'
)
EARLIER = ('import os; any(n.startswith("GLM5_") for n in os.environ) and __import__("glm5_plugins.autostart")\n',)
"""What other versions wrote, which brings the layer in as well."""


def path() -> Path:
    """Where the line is, or would be."""
    return Path(sysconfig.get_path("purelib")) / "glm5_plugins.pth"


def enabled() -> bool:
    """Whether this environment has the line, as this version writes it or an earlier one did."""
    return _there() in (LINE, *EARLIER)


def _there() -> str:
    try:
        return path().read_text()
    except OSError:
        return ""


def enable() -> bool:
    """Write the line; return whether it was not there yet, as this version writes it.

    Raises:
        ConfigurationError: The folder cannot be written.
    """
    if _there() == LINE:
        return False
    temporary = path().with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(LINE)
        temporary.replace(path())
    except OSError as error:
        with suppress(OSError):  # a read-only file system refuses to remove even what is not there
            temporary.unlink()
        raise _not_writable(error) from None
    return True


def disable() -> bool:
    """Remove the line; return whether it was there.

    Raises:
        ConfigurationError: The folder cannot be written.
    """
    try:
        path().unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _not_writable(error) from None
    return True


def _not_writable(error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"{path()} cannot be changed: {error.strerror or error}.",
        "Run it as the owner of that folder, or start with `python -m glm5_plugins.launch sglang.launch_server …`.",
    )
