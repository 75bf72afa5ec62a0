"""Profiles: a launch that people really run, as TOML in this folder or anywhere else.

What the user typed always wins over a profile: its arguments are added where none were given, its environment variables
set where they are unset, its plugins and their options taken where no `GLM5_*` variable says otherwise.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from glm5_plugins.errors import ConfigurationError, did_you_mean
from glm5_plugins.rules import Does, Launch, Rule

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent
LARGEST = 64 * 1024
"""Bytes of the largest profile that is read."""

Scalar = str | int | float | bool
Value = Scalar | list[Scalar] | dict[str, Any]

# Read before any Python code of ours runs: a profile would set them in vain.
_TOO_LATE = re.compile(r"PYTHON[A-Z]+|LD_[A-Z_]+|CUDA_VISIBLE_DEVICES|SGLANG_PLUGINS|GLM5_.*")


def _range(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"{text!r} is no version range such as '>=0.5.14,<0.5.20'") from error
    return text


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Where(_Part):
    """When a part of a profile holds; what is left out holds always."""

    sglang: Annotated[str, AfterValidator(_range)] = ""
    """A range of versions, such as `>=0.5.14,<0.5.20`."""
    architecture: tuple[str, ...] = ()
    """Families of GPUs: sm90, sm100, sm120."""
    given: Mapping[str, tuple[Scalar, ...]] = Field(default_factory=dict)
    """For each field the values that it may have, SGLang's defaults included."""
    absent: tuple[str, ...] = ()
    """Fields that nobody gave."""

    def holds(self, launch: Launch) -> bool:
        """Whether this part is about the launch."""
        return self._rule(Does.ADD, "").holds(launch)

    def _rule(self, does: Does, why: str, mend: str = "", source: str = "") -> Rule:
        return Rule(
            does,
            why,
            mend,
            sglang=self.sglang,
            arch=self.architecture,
            given=self.given,
            when=lambda launch: all(launch.given.get(name) in (None, False) for name in self.absent),
            source=source,
        )


class Arguments(Where):
    """Server arguments for some launches, by field of the newest `ServerArgs`."""

    add: Mapping[str, Value]


class Variables(Where):
    """Environment variables for some launches."""

    set: Mapping[str, str]
    why: str = ""

    _check = field_validator("set")(lambda cls, names: _settable(names))


class Condition(Where):
    """A rule that a launch must keep."""

    level: Literal["error", "warning"]
    why: str
    mend: str
    source: str = ""

    def rule(self) -> Rule:
        """As a row of a table."""
        return self._rule(Does.REFUSE if self.level == "error" else Does.WARN, self.why, self.mend, self.source)


class Profile(_Part):
    """A launch.

    Raises:
        pydantic.ValidationError: A field is unknown, missing or of the wrong type.
    """

    name: str
    """How GLM5_PROFILE calls it: the name of its file."""
    summary: str
    sglang: Annotated[str, AfterValidator(_range)]
    """The versions it is meant for."""
    hardware: str
    source: tuple[str, ...]
    """Where the launch was published."""
    models: tuple[str, ...] = ()
    """Names of models, with `*`: `glm5-plugins check` recognises a launch by them."""
    architecture: tuple[str, ...] = ()
    """Families of GPUs that it is for."""
    plugins: tuple[str, ...] = ()
    options: Mapping[Annotated[str, Field(pattern="^GLM5_[A-Z0-9_]+$")], str] = Field(default_factory=dict)
    """`GLM5_*` variables, taken where they are unset."""
    arguments: tuple[Arguments, ...] = ()
    environment: tuple[Variables, ...] = ()
    rules: tuple[Condition, ...] = ()

    @property
    def defaults(self) -> dict[str, str]:
        """What settings are where no variable is set, by variable."""
        own = {"GLM5_PLUGINS": ",".join(self.plugins)} if self.plugins else {}
        return {**own, **self.options}

    def arguments_for(self, launch: Launch) -> dict[str, Any]:
        """The arguments to add to a launch, by the fields that its version has; later tables win over earlier ones."""
        from glm5_plugins.flags import field_in

        found: dict[str, Any] = {}
        for part in self.arguments:
            if part.holds(launch.having(**{**found, **launch.given})):
                found.update(part.add)
        spelled = {field_in(name, launch): value for name, value in found.items()}
        return {name: value for name, value in spelled.items() if name not in launch.given}

    def variables_for(self, launch: Launch) -> dict[str, str]:
        """The environment variables that a launch wants."""
        found: dict[str, str] = {}
        for part in self.environment:
            if part.holds(launch):
                found.update(part.set)
        return found

    def table(self) -> tuple[Rule, ...]:
        """Its rules, as the table of a plugin."""
        meant = (
            Rule(
                Does.WARN,
                f"the profile is meant for SGLang {self.sglang}, and this is {{sglang}}",
                "Choose another profile (`glm5-plugins profiles`), or upgrade.",
                when=lambda launch: not launch.is_sglang(self.sglang),
            ),
            Rule(
                Does.WARN,
                f"the profile is meant for {self.hardware}, and this GPU is {{arch}}",
                "Choose another profile (`glm5-plugins profiles`).",
                when=lambda launch: (
                    bool(self.architecture) and launch.architecture not in (*self.architecture, "none", "unknown")
                ),
            ),
        )
        return (*meant, *(condition.rule() for condition in self.rules))

    def fits(self, launch: Launch) -> bool:
        """Whether the model's name is one of its own, and the GPU of its family where that is known."""
        names = (*_names(launch.get("model_path")), str(launch.get("served_model_name") or "").casefold())
        named = any(fnmatchcase(one, pattern.casefold()) for one in names for pattern in self.models)
        return named and (launch.architecture in ("unknown", "none") or launch.architecture in self.architecture)


def _names(model_path: Any) -> tuple[str, str]:
    """A model's name as a path says it, with a slash in front where it is bare; the hub's cache says it in a folder."""
    path = str(model_path or "").casefold().rstrip("/")
    cached = re.search(r"(?:^|/)models--([^/]+?)--([^/]+)(?:/snapshots/[^/]+)?$", path)
    name = f"{cached[1]}/{cached[2]}" if cached else path
    return name, f"/{name}"


def _settable(names: Mapping[str, str]) -> Mapping[str, str]:
    for name in names:
        if _TOO_LATE.fullmatch(name):
            raise ValueError(f"{name} is read before a profile can set it")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is no name of an environment variable")
    return names


def known() -> list[str]:
    """The names of the bundled profiles."""
    return sorted(file.stem for file in FOLDER.glob("[!_]*.toml"))


def bundled() -> Iterator[Profile]:
    """Every bundled profile."""
    return (load(name) for name in known())


def _with_includes(document: dict[str, Any]) -> dict[str, Any]:
    """Put the parts that `includes` names before the profile's own: `sm120` is `_sm120.toml` in this folder."""
    document = _listed(document)
    includes = document.pop("includes", [])
    if not isinstance(includes, list):
        raise ConfigurationError(f"A profile's includes are {includes!r}, not a list.", 'Write includes = ["sm120"].')
    for name in reversed(includes):
        parts = sorted(file.stem[1:] for file in FOLDER.glob("_*.toml"))
        if name not in parts:
            raise ConfigurationError(f"A profile includes an unknown part {name!r}.", did_you_mean(str(name), parts))
        part = _listed(tomllib.loads((FOLDER / f"_{name}.toml").read_text(encoding="utf-8")))
        for key in ("arguments", "environment", "rules"):
            own = document.get(key, [])
            if isinstance(own, list):  # else the model says what is wrong with it
                document[key] = [*part.get(key, []), *own]
    return document


def _listed(document: dict[str, Any]) -> dict[str, Any]:
    """`[arguments]` and `[environment]` alone are for every launch; `[[arguments]]` has conditions."""
    listed = dict(document)
    for key, inner in (("arguments", "add"), ("environment", "set")):
        if isinstance(listed.get(key), dict):
            listed[key] = [{inner: listed[key]}]
    return listed


@cache
def load(name: str) -> Profile:
    """Read a profile by the name of a bundled one, or by a path (anything with a slash or `.toml`).

    Raises:
        ConfigurationError: There is none, it is too large, or something in it is wrong; the text says where.
    """
    is_path = "/" in name or name.endswith(".toml")
    file = Path(os.path.expanduser(name)) if is_path else FOLDER / f"{name}.toml"
    if not is_path and name not in known():
        raise ConfigurationError(f"GLM5_PROFILE names an unknown profile {name!r}.", did_you_mean(name, known()))
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        mend = f"Give the path of a TOML file, or one of: {', '.join(known())}."
        why = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"GLM5_PROFILE={name} cannot be read: {why}.", mend) from None
    if len(content) > LARGEST:
        raise ConfigurationError(
            f"GLM5_PROFILE={name} is larger than {LARGEST} bytes.", "A profile is a short TOML file: is this one?"
        )
    try:
        return Profile.model_validate({"name": file.stem, **_with_includes(tomllib.loads(content.decode("utf-8")))})
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(f"GLM5_PROFILE={name} is not TOML: {error}.", "Correct that line.") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigurationError(
            f"GLM5_PROFILE={name}: {where}: {first['msg']}.", "See the bundled profiles (`glm5-plugins profiles`)."
        ) from None
