"""The settings model: what the layer and each plugin read from `GLM5_*` variables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import SecretBytes, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from glm5_plugins.errors import ConfigurationError

PREFIX = "GLM5_"

_MEND = "Correct the value, or unset the variable for the default."

Model = TypeVar("Model", bound=BaseSettings)


# `GLM5_*` variables of the active profile: what a setting is where the environment says nothing.
_of_profile: dict[str, str] = {}


def take_from_profile(values: Mapping[str, str]) -> None:
    """Let settings be read from a profile where the environment says nothing; an empty mapping ends that."""
    _of_profile.clear()
    _of_profile.update(values)


def from_profile(variable: str) -> str | None:
    """What the active profile says for a variable."""
    return _of_profile.get(variable)


class _FromProfile(EnvSettingsSource):
    """Reads the active profile as the environment is read."""

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in _of_profile.items()}


class _Settings(BaseSettings):
    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment over profile over defaults."""
        return init_settings, env_settings, _FromProfile(settings_cls)


class HostSettings(_Settings):
    """The variables of the layer itself."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    plugins: Annotated[tuple[str, ...], NoDecode] = ()
    """Names of the plugins wanted, separated by commas; the first is the outermost."""
    profile: str | None = None
    """The name of a bundled profile, or the path of one: plugins, arguments and variables of a whole launch."""
    on_error: Literal["strict", "warn"] = "strict"
    """What to do when a requested plugin cannot be in force: stop the launch, or log a warning."""
    report: Path | None = None
    """A folder, or a file that ends in `.jsonl`, for the verdicts of every process."""
    agreement: Literal["on", "off"] = "on"
    """Whether the ranks of a server compare plugins, options, versions and verdicts, and stop where they differ."""

    @field_validator("plugins", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))


def split_at_commas(value: Any) -> Any:
    """For `field_validator(…, mode="before")` of a tuple: the parts of a variable's text, other values as they are."""
    return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value


class PluginSettings(_Settings):
    """Base of a plugin's options; the class says whose they are.

        class Options(PluginSettings, plugin="fp4_warmup"):
            timeout_s: float = 1800.0

    reads `GLM5_FP4_WARMUP_TIMEOUT_S`.
    """

    model_config = SettingsConfigDict(extra="ignore", frozen=True)

    plugin_name: ClassVar[str] = ""

    def __init_subclass__(cls, plugin: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if plugin:
            cls.plugin_name = plugin

    @classmethod
    def __pydantic_init_subclass__(cls, plugin: str = "", **kwargs: Any) -> None:
        """Derive the prefix of the variables from the plugin's name."""
        super().__pydantic_init_subclass__(**kwargs)
        if plugin:
            cls.model_config["env_prefix"] = prefix_of(plugin)


def prefix_of(plugin: str) -> str:
    """The start of the names of a plugin's variables: `fp4_warmup` gives `GLM5_FP4_WARMUP_`."""
    return f"{PREFIX}{plugin.upper()}_"


def variables_of(model: type[BaseSettings]) -> dict[str, str]:
    """Map the variables a model reads to its field names."""
    prefix = model.model_config.get("env_prefix", "")
    return {f"{prefix}{name}".upper(): name for name in model.model_fields}


def read(model: type[Model]) -> Model:
    """Read a settings model from the environment.

    Raises:
        ConfigurationError: A value does not fit; the text names the variable and the value.
    """
    try:
        return model()
    except ValidationError as error:
        first = error.errors()[0]
        variable = _variable_of(model, str(first["loc"][0]))
        of_first = [one for one in error.errors() if one["loc"][0] == first["loc"][0]]  # one for each part of a union
        why = "; or: ".join(dict.fromkeys(one["msg"] for one in of_first))
        what = f"{variable}={_shown(model, variable, first['input'])} is not valid: {why}."
        raise ConfigurationError(_whose(variable) + what, _MEND) from None
    except (SettingsError, RecursionError) as error:  # a list or a table that is no JSON, or nests without end
        variable = _unreadable(model, error)
        what = f"{variable}={_shown(model, variable, '')} is not valid: JSON is expected."
        raise ConfigurationError(_whose(variable) + what, _MEND) from None


def _shown(model: type[BaseSettings], variable: str, value: Any) -> str:
    return "…" if _is_secret(model, variable) else repr(os.environ.get(variable, _of_profile.get(variable, value)))


def _whose(variable: str) -> str:
    return "The profile's " if variable not in os.environ and variable in _of_profile else ""


def _unreadable(model: type[BaseSettings], error: Exception) -> str:
    """The variable that pydantic-settings could not decode: it names the field, Python names nothing."""
    given = {name: os.environ.get(name, _of_profile.get(name, "")) for name in variables_of(model)}
    named = [variable for variable, name in variables_of(model).items() if f'"{name}"' in str(error)]
    return named[0] if named else max(given, key=lambda variable: len(given[variable]))


def _variable_of(model: type[BaseSettings], name: str) -> str:
    for variable, field_name in variables_of(model).items():
        if name.casefold() in (field_name.casefold(), variable.casefold()):
            return variable
    return name


def _is_secret(model: type[BaseSettings], variable: str) -> bool:
    field = model.model_fields.get(variables_of(model).get(variable, ""))
    return field is not None and "Secret" in str(field.annotation)


def layer_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """The names of all `GLM5_*` variables that are set."""
    return sorted(name for name in (os.environ if environ is None else environ) if name.startswith(PREFIX))


def comparable(options: BaseSettings) -> dict[str, str]:
    """Option values as texts, by field name, without those that are a machine's own matter.

    A path may differ between machines without anything else differing; a secret is not for other processes to see.
    """
    return {
        name: json.dumps(value)
        for name, value in options.model_dump(mode="json").items()
        if not isinstance(getattr(options, name), (Path, SecretStr, SecretBytes))
    }
