"""Where each lifecycle hook is fired in each SGLang version: the one place with version knowledge of the host."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from glm5_plugins import arguments
from glm5_plugins.agreement import Group
from glm5_plugins.environment import Environment, Place, Window
from glm5_plugins.patching import Drift, Patch, Probe, Stage
from glm5_plugins.probes import SourceHas

if TYPE_CHECKING:
    from glm5_plugins.bootstrap import Layer

REQUIRES = "sglang>=0.5.8"
"""The versions that the layer is made for."""

# Each goes around one call of the original: (layer, original, bound arguments, proceed).
Around = Callable[["Layer", "dict[str, Any]", Callable[[], Any]], Any]


def _parser_made(layer: Layer, bound: dict[str, Any], proceed: Callable[[], Any]) -> Any:
    result = proceed()
    if layer.chooses_arguments:
        arguments.add_where_absent(bound["parser"], layer.server_args)
    return result


def _file_merged(layer: Layer, bound: dict[str, Any], proceed: Callable[[], Any]) -> Any:
    parser = getattr(bound["self"], "parser", None)
    if parser is not None and isinstance(bound["config"], dict):
        arguments.note_file(parser, bound["config"])
    return proceed()


def _engine_made(layer: Layer, bound: dict[str, Any], proceed: Callable[[], Any]) -> Any:
    kwargs = bound.get("kwargs", {})
    if layer.chooses_arguments:
        if "server_args" in kwargs:
            layer.note("Engine(server_args=…) was given a finished record: plugins add no arguments to it")
        else:
            kwargs.update(layer.server_args(dict(kwargs)))
    return proceed()


def _logging_configured(layer: Layer, bound: dict[str, Any], proceed: Callable[[], Any]) -> Any:
    result = proceed()
    layer.metrics = bool(getattr(bound["server_args"], "enable_metrics", False))
    layer.logging_is_up()
    return result


def _resolved(server_args: Any, names: Iterable[str]) -> dict[str, Any]:
    """What SGLang decided on, by field: the record itself, or from 0.5.19 what stands beside it."""
    view = server_args
    with contextlib.suppress(ImportError, AttributeError):
        view = import_module("sglang.srt.arg_groups.overrides").resolved_view(server_args)
    return {name: getattr(view, name) for name in names if hasattr(view, name)}


def _launch(layer: Layer, bound: dict[str, Any], proceed: Callable[[], Any]) -> Any:
    layer.reach(Stage.ARGUMENTS)
    layer.launches()
    result = layer.manager.startup(bound["server_args"], proceed)
    try:
        layer.resolved(_resolved(bound["server_args"], layer.added))
    except Exception as error:  # the server is up: a comparison is not worth ending it for
        layer.note(f"what SGLang made of the added arguments cannot be read: {type(error).__name__}: {error}")
    layer.reach(Stage.STARTUP)
    layer.ready()
    return result


def _model_load(layer: Layer, bound: dict[str, Any], proceed: Callable[[], Any]) -> Any:
    layer.verify()
    layer.agree(Stage.MODEL_LOAD)
    result = layer.manager.model_load(bound["self"], proceed)
    layer.reach(Stage.MODEL_LOAD)
    return result


def _capture_decode(layer: Layer, bound: dict[str, Any], proceed: Callable[[], Any]) -> Any:
    layer.agree(Stage.CAPTURE)
    result = layer.manager.graph_capture(bound.get("model_runner", bound.get("self")), "decode", proceed)
    layer.captured("decode")
    return result


def _capture_prefill(layer: Layer, bound: dict[str, Any], proceed: Callable[[], Any]) -> Any:
    layer.agree(Stage.CAPTURE)
    result = layer.manager.graph_capture(bound.get("model_runner", bound.get("self")), "prefill", proceed)
    layer.captured("prefill")
    return result


def _scheduler_made(layer: Layer, bound: dict[str, Any], proceed: Callable[[], Any]) -> Any:
    try:
        result = proceed()
    except BaseException:
        layer.failing()
        raise
    layer.ready()
    return result


def _scheduler_asked(layer: Layer, bound: dict[str, Any], proceed: Callable[[], Any]) -> Any:
    result = proceed()
    # A new dictionary: up to 0.5.13 this one is the server arguments' own.
    result.internal_state = {**result.internal_state, KEY: {layer.env.role.value: layer.summary()}}
    return result


async def _main_asked(layer: Layer, bound: dict[str, Any], proceed: Callable[[], Any]) -> Any:
    states = await proceed()
    for state in states:
        state[KEY] = {layer.env.role.value: layer.summary(), **state.get(KEY, {})}
    return states


KEY = "glm5_plugins"
"""Where `/server_info` holds what the layer says: in each of its `internal_states`, by process role."""


@dataclass(frozen=True)
class Seam:
    """One place in SGLang where a lifecycle step begins and ends.

    Args:
        step: What happens there; seams with one step are alternatives for different versions.
        target: The function, as in `Patch.target`.
        around: Runs in place of a call of the function.
        needs: Parameters relied on.
        requires: The versions that go through this function.
        ends: What ended the window.
        outside: As in `Patch.outside`.
    """

    step: str
    target: str
    around: Around
    needs: tuple[str, ...] = ()
    requires: str = REQUIRES
    ends: str = ""
    outside: Probe | None = None

    def patch(self, layer: Layer) -> Patch:
        """The patch that puts the layer around this function."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            signature = inspect.signature(original)

            @functools.wraps(original)
            def around(*args: Any, **kwargs: Any) -> Any:
                bound = signature.bind(*args, **kwargs)
                values: dict[str, Any] = dict(bound.arguments)
                return self.around(layer, values, lambda: original(*bound.args, **bound.kwargs))

            return around

        return Patch(
            target=self.target,
            using=wrap,
            reason=f"the layer goes around: {self.step}",
            requires=self.requires,
            ends=self.ends,
            outside=self.outside,
            needs=self.needs,
        )


_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_PAST_THE_METHOD = "start-up goes past the method, straight to what it calls"
_SETUP = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"

SEAMS: tuple[Seam, ...] = (
    Seam("logging", "sglang.srt.utils.common:configure_logger", _logging_configured, needs=("server_args",)),
    Seam("arguments", "sglang.srt.server_args:ServerArgs.add_cli_args", _parser_made, needs=("parser",)),
    Seam(
        "arguments",
        "sglang.srt.server_args_config_parser:ConfigArgumentMerger._convert_config_to_args",
        _file_merged,
        needs=("config",),
        requires="sglang>=0.5.8,<0.5.19",
        ends="the module moved to sglang.srt.utils in 0.5.19",
    ),
    Seam(
        "arguments",
        "sglang.srt.utils.server_args_config_parser:ConfigArgumentMerger._convert_config_to_args",
        _file_merged,
        needs=("config",),
        requires="sglang>=0.5.19",
    ),
    Seam("engine", "sglang.srt.entrypoints.engine:Engine.__init__", _engine_made),
    Seam(
        "startup",
        "sglang.srt.entrypoints.engine:_launch_subprocesses",
        _launch,
        needs=("server_args",),
        requires="sglang>=0.5.8,<0.5.10",
        ends="it became a class method of Engine in 0.5.10",
    ),
    Seam(
        "startup",
        "sglang.srt.entrypoints.engine:Engine._launch_subprocesses",
        _launch,
        needs=("server_args",),
        requires="sglang>=0.5.10",
    ),
    Seam("model load", f"{_RUNNER}.load_model", _model_load),
    Seam(
        "decode capture",
        f"{_RUNNER}.init_device_graphs",
        _capture_decode,
        requires="sglang>=0.5.8,<0.5.14",
        ends="renamed init_decode_cuda_graph in 0.5.14",
    ),
    Seam(
        "decode capture",
        f"{_RUNNER}.init_decode_cuda_graph",
        _capture_decode,
        requires="sglang>=0.5.14,<0.5.16",
        ends=f"{_PAST_THE_METHOD}, from 0.5.16",
        outside=SourceHas(f"{_SETUP}:capture_decode_graph", _PAST_THE_METHOD),
    ),
    Seam(
        "decode capture",
        f"{_SETUP}:capture_decode_graph",
        _capture_decode,
        needs=("model_runner",),
        requires="sglang>=0.5.16",
    ),
    Seam(
        "prefill capture",
        f"{_RUNNER}.init_piecewise_cuda_graphs",
        _capture_prefill,
        requires="sglang>=0.5.8,<0.5.14",
        ends="renamed init_prefill_cuda_graph in 0.5.14",
    ),
    Seam(
        "prefill capture",
        f"{_RUNNER}.init_prefill_cuda_graph",
        _capture_prefill,
        requires="sglang>=0.5.14,<0.5.16",
        ends=f"{_PAST_THE_METHOD}, from 0.5.16",
        outside=SourceHas(f"{_SETUP}:capture_prefill_graph", _PAST_THE_METHOD),
    ),
    Seam(
        "prefill capture",
        f"{_SETUP}:capture_prefill_graph",
        _capture_prefill,
        needs=("model_runner",),
        requires="sglang>=0.5.16",
    ),
    Seam("scheduler ready", "sglang.srt.managers.scheduler:Scheduler.__init__", _scheduler_made),
    Seam("scheduler asked", "sglang.srt.managers.scheduler:Scheduler.get_internal_state", _scheduler_asked),
    Seam("main asked", "sglang.srt.managers.tokenizer_manager:TokenizerManager.get_internal_state", _main_asked),
)


def here(env: Environment) -> Iterator[Seam]:
    """The seams of this SGLang: by its version, or by its source where that cannot be placed."""
    for seam in SEAMS:
        place = env.place(Window.parse(seam.requires))
        if place is Place.INSIDE or (place is Place.UNKNOWN and _in_source(seam, env)):
            yield seam


def _in_source(seam: Seam, env: Environment) -> bool:
    from glm5_plugins import source  # not in a server whose version is known

    if source.lacks(seam.target, seam.needs, env.roots) is not None:
        return False
    return seam.outside is None or seam.outside(env) is None


LOADS_PLUGINS = ">=0.5.11"
"""The versions that load installed plugins by themselves, in the processes that matter here."""

NOT_MADE_FOR = "no function of SGLang {} is known to it; it is made for 0.5.8 and later"


def missed(env: Environment) -> Iterator[tuple[str, str]]:
    """The steps that the layer finds no way around, by what the source of this SGLang has, and why."""
    from glm5_plugins import source

    found = list(here(env))
    if not found:
        yield "every step", NOT_MADE_FOR.format(env.version_text("sglang"))
        return
    for step in dict.fromkeys(seam.step for seam in SEAMS):
        if not any(seam.step == step for seam in found):
            yield step, "no function of this SGLang is known for it"
    for seam in found:
        if (lacking := source.lacks(seam.target, seam.needs, env.roots)) is not None:
            yield seam.step, lacking
    for target in RELIED_ON:
        if (lacking := source.lacks(target, (), env.roots)) is not None:
            yield "agreement", lacking


_PARALLEL = "sglang.srt.distributed.parallel_state"

RELIED_ON: tuple[str, ...] = (f"{_PARALLEL}:get_world_group",)
"""Functions that the layer calls without going around them, in all versions."""

RELIED_ON_IN_INSTANCES: tuple[str, ...] = tuple(
    f"{_PARALLEL}:GroupCoordinator.{name}" for name in ("rank_in_group", "world_size", "cpu_group")
)
"""What the layer reads from the instances of a class, in all versions."""


def world() -> Group | None:
    """All ranks of this server; None as long as SGLang has not made their group.

    Raises:
        Drift: This SGLang has no such group.
    """
    try:
        group = import_module(_PARALLEL).get_world_group()
        return Group(group.rank_in_group, group.world_size, group.cpu_group)
    except AssertionError:
        return None
    except (ImportError, AttributeError) as error:
        raise Drift(f"the group of all ranks is not where it was: {error}") from error
