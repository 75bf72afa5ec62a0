"""The plan of a campaign: a TOML file, checked whole before anything is started."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from glm5_plugins.errors import ConfigurationError, did_you_mean

_MOST_BYTES = 1 << 20
_OURS = {
    "GLM5_PLUGINS": "plugins = [...] of the arm",
    "GLM5_PROFILE": "profile = ... of the arm",
    "GLM5_REPORT": "the campaign, which collects the reports",
}
_TAKEN = {
    "--host": "the campaign, which listens on 127.0.0.1",
    "--port": "the campaign, which takes a free one",
    "--model-path": "model = ... of [server]",
    "--model": "model = ... of [server]",
}


def _words(value: Any) -> Any:
    """A command line may be one string, as in a shell, or a list."""
    return tuple(shlex.split(value)) if isinstance(value, str) else value


def _safe_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}", value):
        raise ValueError("a name of letters, digits and _ . + - is wanted, as it names a folder")
    return value


def _distinct(values: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(values)) < len(values):
        raise ValueError("a value stands there twice")
    return values


def _own_settings(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if name in _OURS:
            raise ValueError(f"{name} is set by {_OURS[name]}")
    return env


def _nothing_of_the_layer(env: dict[str, str]) -> dict[str, str]:
    if name := next((name for name in env if name.startswith("GLM5_")), None):
        raise ValueError(f"{name} would run the layer in the baseline, too; set it in the env of an arm")
    return env


def _own_flags(args: tuple[str, ...]) -> tuple[str, ...]:
    for arg in args:
        if (flag := arg.partition("=")[0]) in _TAKEN:
            raise ValueError(f"{flag} is set by {_TAKEN[flag]}")
    return args


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
ServerArguments = Annotated[Words, AfterValidator(_own_flags)]
Variables = Annotated[dict[str, str], AfterValidator(_own_settings)]
Name = Annotated[str, AfterValidator(_safe_name)]
Positive = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Server(_Part):
    """What all arms have in common."""

    model: str
    """Folder or name of the model."""
    tokenizer: str = ""
    """Tokenizer for the benchmark; the model's own if empty."""
    args: ServerArguments = ()
    """Server arguments of every arm."""
    env: Annotated[dict[str, str], AfterValidator(_nothing_of_the_layer)] = {}
    """Environment variables of every arm, and of the benchmark."""
    python: str = sys.executable
    """Interpreter that has SGLang and this package."""
    launcher: Words = ("-m", "sglang.launch_server")
    """What it runs; before 0.5.11 `-m glm5_plugins.launch sglang.launch_server`."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 3600
    """Seconds until /health must answer."""


class Shape(_Part):
    """One kind of request."""

    name: Name
    input: Positive
    """Tokens of the prompt."""
    output: Positive
    """Tokens of the answer."""


class Bench(_Part):
    """How each server is driven, by `python -m sglang.bench_serving`."""

    shapes: Annotated[tuple[Shape, ...], Field(min_length=1)]
    concurrency: Annotated[tuple[Positive, ...], Field(min_length=1), AfterValidator(_distinct)]
    requests_per_client: Positive = 4
    min_requests: Positive = 8
    """Requests of a run: `concurrency` times `requests_per_client`, and no fewer than this."""
    repetitions: Positive = 1
    """Runs of each cell on one started server; they are averaged."""
    args: Words = ("--dataset-name", "random-ids", "--random-range-ratio", "1.0")
    """Further arguments. The default makes up its prompts; `random` fetches ShareGPT."""
    timeout_s: Annotated[float, Field(gt=0)] = 3600

    def requests(self, concurrency: int) -> int:
        """Number of requests of a run."""
        return max(self.min_requests, concurrency * self.requests_per_client)


class Arm(_Part):
    """One variant of the server."""

    name: Name
    plugins: tuple[str, ...] = ()
    profile: str = ""
    args: ServerArguments = ()
    env: Variables = {}

    @model_validator(mode="after")
    def _layer_has_something_to_do(self) -> Arm:
        if not self.uses_layer and (name := next((name for name in self.env if name.startswith("GLM5_")), None)):
            raise ValueError(f"{name} does nothing in an arm without plugins or a profile")
        return self

    @property
    def uses_layer(self) -> bool:
        """Whether this arm's servers run this layer; without, no `GLM5_*` variable is set."""
        return bool(self.plugins or self.profile)


class Decision(_Part):
    """When an arm is said to pay."""

    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """That not one interval of the whole campaign misses."""
    worth_percent: Annotated[float, Field(ge=0, lt=100)] = 1.0
    """A gain below this is not worth having: an arm whose interval ends below it does not pay."""


@dataclass(frozen=True)
class Cell:
    """A shape at a concurrency: what is compared between arms."""

    shape: str
    concurrency: int

    def __str__(self) -> str:
        return f"{self.shape} x{self.concurrency}"


class Plan(_Part):
    """A whole campaign."""

    name: Name
    rounds: Positive = 5
    """Starts of each arm's server. Each round starts every arm once, so that a round's figures are a pair."""
    baseline: str = ""
    """Name of the arm the others are compared to; the first if empty."""
    server: Server
    bench: Bench
    arms: Annotated[tuple[Arm, ...], Field(min_length=2)]
    decision: Decision = Decision()

    @model_validator(mode="after")
    def _fits_together(self) -> Plan:
        for what, names in (("arms", [a.name for a in self.arms]), ("shapes", [s.name for s in self.bench.shapes])):
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"two {what} are called {twice!r}")
        if self.baseline and self.baseline not in [arm.name for arm in self.arms]:
            raise ValueError(f"baseline = {self.baseline!r} is no arm")
        return self

    @property
    def base(self) -> Arm:
        """The arm that the others are compared to."""
        return next((arm for arm in self.arms if arm.name == self.baseline), self.arms[0])

    @property
    def challengers(self) -> tuple[Arm, ...]:
        """The other arms."""
        return tuple(arm for arm in self.arms if arm is not self.base)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All shapes at all concurrencies, in the order they are run."""
        return tuple(
            Cell(shape=shape.name, concurrency=level)
            for shape in self.bench.shapes
            for level in sorted(self.bench.concurrency)
        )

    def shape(self, name: str) -> Shape:
        """The shape of that name."""
        return next(shape for shape in self.bench.shapes if shape.name == name)

    def order(self, number: int) -> tuple[Arm, ...]:
        """The arms of a round, counted from 0, in the order they are started.

        Turned by one each round, and backwards in every other turn, so that each arm comes first, last and after each
        other arm about equally often: what drifts with time does not favour one.
        """
        count = len(self.arms)
        turned = [self.arms[(number + index) % count] for index in range(count)]
        return tuple(reversed(turned)) if number // count % 2 else tuple(turned)


def read(path: Path) -> Plan:
    """Read and check a plan.

    Raises:
        ConfigurationError: It cannot be read, is no TOML, or something in it does not fit; the text names the key.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            f"The plan {path} cannot be read: {error.strerror}.", "Give the path of a TOML file."
        ) from None
    if len(raw) > _MOST_BYTES:
        raise ConfigurationError(f"The plan {path} is larger than a megabyte.", "Give the path of a TOML file.")
    try:
        document = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The plan {path} is not TOML: {error}.", "See https://toml.io.") from None
    try:
        plan = Plan.model_validate(document)
    except ValidationError as error:
        raise ConfigurationError(*_explain(path, document, error)) from None
    _check_plugins(plan)
    return plan


def _explain(path: Path, document: dict[str, Any], error: ValidationError) -> tuple[str, str]:
    errors = error.errors()  # a key that is misspelled is also missing: say the former
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    key = _spell(document, first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"The plan {path} has an unknown key {key}.", did_you_mean(str(first["loc"][-1]), _keys(first["loc"]))
    if first["type"] == "missing":
        return f"The plan {path} lacks {key}.", "Add it; `glm5-plugins campaign --example` prints a whole plan."
    given = "" if isinstance(first["input"], dict) else f" = {first['input']!r}"
    return f"The plan {path}: {key or 'the plan'}{given}: {message}.", "Correct it, or leave it out for the default."


def _spell(document: Any, location: tuple[int | str, ...]) -> str:
    """`arms[fp4].env` rather than `arms.1.env`."""
    spelled = ""
    for part in location:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            document = None
        if isinstance(part, int):
            name = document.get("name", part) if isinstance(document, dict) else part
            spelled += f"[{name}]"
        else:
            spelled += f".{part}" if spelled else part
    return spelled


_PARTS: dict[str, type[BaseModel]] = {
    "server": Server,
    "bench": Bench,
    "arms": Arm,
    "shapes": Shape,
    "decision": Decision,
}


def _keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys that the table of a location may have."""
    tables = [_PARTS[str(step)] for step in location[:-1] if str(step) in _PARTS]
    return list((tables[-1] if tables else Plan).model_fields)


def _check_plugins(plan: Plan) -> None:
    """Refuse unknown plugins now rather than an hour later; another interpreter may know others."""
    if plan.server.python != sys.executable:
        return
    from glm5_plugins.manager import PluginManager

    known = PluginManager.known()
    for arm in plan.arms:
        for name in arm.plugins:
            if name not in known:
                raise ConfigurationError(
                    f"The arm {arm.name!r} names an unknown plugin {name!r}.", did_you_mean(name, known)
                )


EXAMPLE = """\
name = "glm5-nvfp4"
rounds = 5                      # starts of each arm's server; pairs within a round are compared

[server]
model = "/models/GLM-5-NVFP4"
args = "--tp 8 --quantization modelopt_fp4 --kv-cache-dtype bf16 --trust-remote-code"
start_timeout_s = 3600

[server.env]
SAFETENSORS_FAST_GPU = "1"

[bench]
concurrency = [1, 10, 256, 1024]
requests_per_client = 4

[[bench.shapes]]
name = "chat"
input = 1024
output = 256

[[arms]]                        # the first arm is the baseline
name = "baseline"

[[arms]]
name = "cuda_version"
plugins = ["cuda_version"]

[[arms]]
name = "no-shared-fusion"
args = "--disable-shared-experts-fusion"

[decision]
confidence = 0.95               # for the campaign as a whole
worth_percent = 1.0             # a smaller gain is not worth having
"""
