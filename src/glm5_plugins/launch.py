"""`python -m glm5_plugins.launch sglang.launch_server …`: the layer first, then the module.

The earliest way in, on any SGLang and with nothing written to site-packages. Spawned children re-import the main
module, which stays this one, so the layer comes first in them too.
"""

from __future__ import annotations

import runpy
import sys

USAGE = "usage: python -m glm5_plugins.launch MODULE [ARGUMENT ...], as in: … sglang.launch_server --model-path …"


def main() -> None:
    """Run the module named in the command line as `python -m` would, with the layer in place."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(USAGE)
    module = sys.argv[1]
    del sys.argv[0]
    # alter_sys would make MODULE the main module, which the children then import in place of this one.
    sys.argv[0] = _path_of(module)
    runpy.run_module(module, run_name="__main__", alter_sys=False)


def _path_of(module: str) -> str:
    """What `python -m` puts into `sys.argv[0]`."""
    from importlib.util import find_spec

    try:
        spec = find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{module}.__main__")
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # MODULE is there, and imports what is not
            package = module.partition(".")[0]
            raise SystemExit(
                f"glm5-plugins: {package} cannot be imported: there is no module named {error.name!r}.\n"
                "  Install the package that has it into this environment."
            ) from None
        raise SystemExit(f"glm5-plugins: no module named {error.name!r}\n  {USAGE}") from None
    if spec is None or spec.origin is None:
        raise SystemExit(f"glm5-plugins: no module named {module!r} that can be run\n  {USAGE}")
    return spec.origin


if __name__ in ("__main__", "__mp_main__"):
    from glm5_plugins import bootstrap

    bootstrap.start("launcher")

if __name__ == "__main__":
    main()
