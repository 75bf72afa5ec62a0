"""The plugin manager: loads plugins by name and calls their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from glm5_plugins import hookspecs
from glm5_plugins.errors import ConfigurationError, NotInForce, PluginError, did_you_mean

if TYPE_CHECKING:
    from glm5_plugins.environment import Environment
    from glm5_plugins.findings import Finding
    from glm5_plugins.hookspecs import CaptureKind
    from glm5_plugins.patching import Outcome, Patch
    from glm5_plugins.settings.model import PluginSettings

# Bundled plugins: `glm5_plugins.plugins.<name>`.
BUNDLED = (
    "cuda_version",
    "ep",
    "fp4_custom_op",
    "fp4_graph_break",
    "fp4_warmup",
    "moe_autotune",
    "moe_runner",
    "mscclpp",
    "no_fullgraph",
    "piecewise",
    "sbo",
)

# Third-party plugins: an entry point of this group names a module or object with hook implementations.
GROUP = "glm5_plugins"


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin and what it declares about itself.

    A plugin is a module, or any object, with hook implementations and, where it has them:
    `Options` (a `PluginSettings` class), `requires` and `conflicts` (names of plugins).
    """

    name: str
    body: Any
    origin: str

    @property
    def summary(self) -> str:
        """The first line of the plugin's docstring."""
        return (getattr(self.body, "__doc__", None) or "").strip().partition("\n")[0]

    @property
    def options(self) -> type[PluginSettings] | None:
        """The plugin's settings model."""
        return getattr(self.body, "Options", None)

    @property
    def requires(self) -> tuple[str, ...]:
        """Plugins that must be requested with this one."""
        return tuple(getattr(self.body, "requires", ()))

    @property
    def conflicts(self) -> tuple[str, ...]:
        """Plugins that must not be requested with this one."""
        return tuple(getattr(self.body, "conflicts", ()))


class PluginManager:
    """The plugins of one process, in the order they were asked for; the first is the outermost wrapper."""

    def __init__(self) -> None:
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        self._pluggy.register(_Core(), "glm5 core")
        self.plugins: list[Plugin] = []
        self.calls = dict.fromkeys(hookspecs.WRAPPING, 0)
        """How often each wrapping hook has been reached in this process."""

    @staticmethod
    def third_party() -> dict[str, EntryPoint]:
        """The installed third-party plugins by name; nothing is imported."""
        return {point.name: point for point in entry_points(group=GROUP)}

    @classmethod
    def known(cls) -> list[str]:
        """The names that `GLM5_PLUGINS` may hold."""
        return sorted({*BUNDLED, *cls.third_party()})

    @classmethod
    def find(cls, name: str) -> Plugin:
        """Import a plugin without registering it.

        Raises:
            ConfigurationError: No such plugin; the text suggests the nearest name.
            NotInForce: The plugin's distribution is broken: its module does not import.
        """
        outside = cls.third_party()
        if name in BUNDLED:
            if name in outside:
                raise ConfigurationError(
                    f"{_origin(outside[name])} brings a plugin {name!r}, which is the name of a bundled one.",
                    "Uninstall it, or ask its authors to choose another name.",
                )
            return Plugin(name, import_module(f"glm5_plugins.plugins.{name}"), "bundled")
        if name not in outside:
            raise ConfigurationError(f"GLM5_PLUGINS names an unknown plugin {name!r}.", did_you_mean(name, cls.known()))
        point = outside[name]
        try:
            body = point.load()
        except Exception as error:
            raise NotInForce(
                f"The plugin {name!r} of {_origin(point)} does not import: {type(error).__name__}: {error}",
                "Mend or upgrade that distribution, or take the name out of GLM5_PLUGINS.",
            ) from error
        return Plugin(name, body, _origin(point))

    def load(self, names: Sequence[str]) -> None:
        """Load plugins by name and check that they fit together.

        Raises:
            ConfigurationError: A name is unknown, a plugin needs or excludes another, or a hook is written in a
                form that cannot work.
            NotInForce: A third-party plugin does not import.
        """
        self.plugins = [self.find(name) for name in names]
        for plugin in self.plugins:
            for other in plugin.requires:
                if other not in names:
                    raise ConfigurationError(
                        f"The plugin {plugin.name!r} needs {other!r}, which is not requested.",
                        f"Set GLM5_PLUGINS={','.join([*names, other])}",
                    )
            for other in plugin.conflicts:
                if other in names:
                    raise ConfigurationError(
                        f"The plugins {plugin.name!r} and {other!r} exclude each other.",
                        "Take one of them out of GLM5_PLUGINS.",
                    )
        # pluggy calls the plugin registered last first.
        for plugin in reversed(self.plugins):
            self._register(plugin)

    def _register(self, plugin: Plugin) -> None:
        try:
            self._pluggy.register(plugin.body, plugin.name)
            self._pluggy.check_pending()
        except pluggy.PluginValidationError as error:
            raise ConfigurationError(
                f"The plugin {plugin.name!r} implements a hook in a way that does not fit: {error}",
                "See glm5_plugins.hookspecs for the hooks and their arguments.",
            ) from error
        for caller in self._pluggy.get_hookcallers(plugin.body) or ():
            for implementation in caller.get_hookimpls():
                if implementation.plugin is not plugin.body or caller.name not in hookspecs.WRAPPING:
                    continue
                if not (implementation.wrapper or implementation.hookwrapper):
                    raise ConfigurationError(
                        f"The plugin {plugin.name!r} implements {caller.name} without wrapper=True, "
                        "which would take the place of SGLang's own step.",
                        f"Write @hookimpl(wrapper=True) on {caller.name} and yield once.",
                    )

    def __iter__(self) -> Iterator[Plugin]:
        return iter(self.plugins)

    def implements(self, hook: str, plugin: Plugin | None = None) -> bool:
        """Whether a plugin, or any of them, implements a hook."""
        implementations = getattr(self._pluggy.hook, hook).get_hookimpls()
        bodies = [one.body for one in self.plugins if plugin is None or one is plugin]
        return any(implementation.plugin is body for implementation in implementations for body in bodies)

    def wrapping_hooks(self, plugin: Plugin) -> list[str]:
        """The wrapping hooks that a plugin implements."""
        return [hook for hook in hookspecs.WRAPPING if self.implements(hook, plugin)]

    def patches(self, env: Environment) -> list[tuple[Plugin, Patch]]:
        """Collect the patches of every plugin, in the order of `GLM5_PLUGINS`."""
        return [(plugin, patch) for plugin, patches in self._collect("glm5_patches", env=env) for patch in patches]

    def server_args(self, env: Environment, given: Mapping[str, Any]) -> dict[str, tuple[Plugin, Any]]:
        """Collect server arguments to add, by field of `ServerArgs`, without those the user gave.

        Raises:
            ConfigurationError: Two plugins want different values for one field.
        """
        wanted = self._wanted(env, given, {})
        if not wanted or len(self.plugins) < 2:
            return wanted
        # Again, now that each can see what the others add: what it chose, or let pass, may not go with that. Nothing
        # is taken back, so what each has seen is what is launched.
        return {**wanted, **self._wanted(env, given, wanted)}

    def _wanted(
        self, env: Environment, given: Mapping[str, Any], others: Mapping[str, tuple[Plugin, Any]]
    ) -> dict[str, tuple[Plugin, Any]]:
        """What each plugin adds to what is given and what others add."""
        wanted: dict[str, tuple[Plugin, Any]] = {}
        for plugin in self.plugins:
            seen = {**{name: value for name, (other, value) in others.items() if other is not plugin}, **given}
            for _, additions in self._collect("glm5_server_args", only=plugin, env=env, given=seen):
                for name, value in additions.items():
                    if name in seen:
                        continue
                    first, known = wanted.setdefault(name, (plugin, value))
                    if known != value:
                        both = f"{first.name!r} and {plugin.name!r}"
                        raise ConfigurationError(
                            f"The plugins {both} want {name}={known!r} and {name}={value!r}.",
                            f"Give --{name.replace('_', '-')} yourself, or take one of them out of GLM5_PLUGINS.",
                        )
        return wanted

    def outcome(self, plugin: Plugin, env: Environment) -> Outcome | None:
        """Ask a plugin what became of it in this process."""
        with self._attributing("glm5_outcome"):
            found: list[Outcome] = self._caller("glm5_outcome", plugin)(env=env)
        return found[0] if found else None

    def findings(self, env: Environment) -> list[Finding]:
        """Let every plugin check what it needs on this machine."""
        return [finding for _, findings in self._collect("glm5_preflight", env=env) for finding in findings]

    def _collect(self, hook: str, only: Plugin | None = None, **arguments: Any) -> list[tuple[Plugin, Any]]:
        results = []
        for plugin in self.plugins if only is None else [only]:
            caller = self._caller(hook, plugin)
            with self._attributing(hook):
                for result in caller(**arguments):
                    results.append((plugin, list(result) if not isinstance(result, Mapping) else result))
        return results

    def _caller(self, hook: str, plugin: Plugin) -> pluggy.HookCaller:
        """The hook as one plugin implements it."""
        others = [other.body for other in self.plugins if other is not plugin]
        return self._pluggy.subset_hook_caller(hook, others)

    def startup(self, server_args: Any, proceed: Callable[[], Any]) -> Any:
        """Run the launch inside the plugins' `glm5_startup`."""
        return self._wrap("glm5_startup", proceed, server_args=server_args)

    def model_load(self, model_runner: Any, proceed: Callable[[], Any]) -> Any:
        """Run the loading of weights inside the plugins' `glm5_model_load`."""
        return self._wrap("glm5_model_load", proceed, model_runner=model_runner)

    def graph_capture(self, model_runner: Any, kind: CaptureKind, proceed: Callable[[], Any]) -> Any:
        """Run a capture inside the plugins' `glm5_graph_capture`."""
        return self._wrap("glm5_graph_capture", proceed, model_runner=model_runner, kind=kind)

    def _wrap(self, hook: str, proceed: Callable[[], Any], **arguments: Any) -> Any:
        raised: list[BaseException] = []
        self.calls[hook] += 1

        def watched() -> Any:
            try:
                return proceed()
            except BaseException as error:
                raised.append(error)
                raise

        with self._attributing(hook, raised):
            result = getattr(self._pluggy.hook, hook)(proceed=watched, **arguments)
            if not (isinstance(result, tuple) and len(result) == 1):
                raise PluginError(
                    f"A plugin's {hook} returned {result!r} in place of what its yield gave.",
                    f"End {hook} with `return result`, where `result = yield`.",
                )
            return result[0]

    def _attributing(self, hook: str, raised: Sequence[BaseException] = ()) -> _Attribution:
        return _Attribution(self.plugins, hook, raised)


class _Core:
    """The innermost implementation of the wrapping hooks: SGLang's own step."""

    @hookspecs.hookimpl(trylast=True)
    def glm5_startup(self, proceed: Callable[[], Any]) -> tuple[Any]:
        return (proceed(),)

    @hookspecs.hookimpl(trylast=True)
    def glm5_model_load(self, proceed: Callable[[], Any]) -> tuple[Any]:
        return (proceed(),)

    @hookspecs.hookimpl(trylast=True)
    def glm5_graph_capture(self, proceed: Callable[[], Any]) -> tuple[Any]:
        return (proceed(),)


class _Attribution:
    """Names the plugin whose hook raised; lets errors of SGLang, and refusals of the layer, pass untouched."""

    def __init__(self, plugins: Iterable[Plugin], hook: str, raised: Sequence[BaseException]) -> None:
        self._plugins = plugins
        self._hook = hook
        self._raised = raised

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None or not isinstance(error, Exception) or any(error is one for one in self._raised):
            return
        if isinstance(error, (ConfigurationError, NotInForce, PluginError)):
            return
        name = self._culprit(error)
        raise PluginError(
            f"The plugin {name!r} failed in {self._hook}: {type(error).__name__}: {error}",
            "The traceback above is the plugin's; take its name out of GLM5_PLUGINS to start without it.",
        ) from error

    def _culprit(self, error: BaseException) -> str:
        owners = {}
        for plugin in self._plugins:
            function = getattr(plugin.body, self._hook, None)
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            if code is not None:
                owners[code] = plugin.name
        # The innermost: pluggy throws an error through the wrappers around the one that raised it.
        culprit = "?"
        frame = error.__traceback__
        while frame is not None:
            culprit = owners.get(frame.tb_frame.f_code, culprit)
            frame = frame.tb_next
        return culprit


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
