"""The lifecycle hooks a plugin may implement, in the order SGLang reaches them.

Collecting hooks return values and are asked of every plugin. Wrapping hooks go around a step of SGLang: write
them with `@hookimpl(wrapper=True)`, `yield` once, and return what the `yield` gave. The plugin named first in
`GLM5_PLUGINS` is the outermost. Code of a hook runs outside traced code and may log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pluggy

if TYPE_CHECKING:
    from glm5_plugins.environment import Environment
    from glm5_plugins.findings import Finding
    from glm5_plugins.patching import Outcome, Patch

PROJECT = "glm5_plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

CaptureKind = Literal["decode", "prefill"]


@hookspec
def glm5_patches(env: Environment) -> Iterable[Patch]:  # type: ignore[empty-body]
    """Yield the patches of this plugin; asked once in every process, before SGLang's modules are changed.

    Args:
        env: Versions, process role and hardware, all looked up only when asked for.
    """


@hookspec
def glm5_server_args(env: Environment, given: Mapping[str, Any]) -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Return server arguments to add where the user gave none; main process, before SGLang resolves them.

    Args:
        env: As in `glm5_patches`.
        given: What the user gave, by field name of `ServerArgs` (`tp_size`), from the command line, a
            `--config` file or `Engine(**kwargs)`. Where several plugins are asked for, each is asked a second time,
            with what the others add among it.

    Returns:
        Values by field name. A field the user gave is left alone. Two plugins that want different values for
        one field are a conflict, and the launch stops.
    """


@hookspec(firstresult=True)
def glm5_startup(server_args: Any, proceed: Callable[[], Any]) -> tuple[Any] | None:
    """Wrap the launch; main process, from resolved arguments to all child processes being ready.

    Mirrors `sglang.srt.entrypoints.engine`, `_launch_subprocesses`.
    """


@hookspec(firstresult=True)
def glm5_model_load(model_runner: Any, proceed: Callable[[], Any]) -> tuple[Any] | None:
    """Wrap the loading of weights; each scheduler process, once for each model runner, drafts included.

    Mirrors `sglang.srt.model_executor.model_runner`, `ModelRunner.load_model`.
    """


@hookspec(firstresult=True)
def glm5_graph_capture(model_runner: Any, kind: CaptureKind, proceed: Callable[[], Any]) -> tuple[Any] | None:
    """Wrap the capture of CUDA graphs; each scheduler process, even where SGLang then captures none.

    SGLang up to 0.5.13 captures decode before prefill, later versions prefill before decode.
    """


@hookspec
def glm5_outcome(env: Environment) -> Outcome | None:
    """Say what became of this plugin in this process so far; asked whenever verdicts are reported.

    For a plugin that works in wrapping hooks: without this, its rows say no more than that the hook is there. A bad
    verdict is acted on at the end of the step of the start in which it came up.

    Args:
        env: As in `glm5_patches`.

    Returns:
        None while there is nothing to say.
    """


@hookspec
def glm5_preflight(env: Environment) -> Iterable[Finding]:  # type: ignore[empty-body]
    """Check what this plugin needs on this machine; asked by `glm5-plugins doctor`, never by a server.

    Args:
        env: As in `glm5_patches`.

    Returns:
        What is wrong; nothing where all is well. SGLang, FlashInfer and PyTorch must not be imported for it.
    """


WRAPPING: Sequence[str] = ("glm5_startup", "glm5_model_load", "glm5_graph_capture")
