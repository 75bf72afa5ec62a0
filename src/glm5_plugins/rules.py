"""Rules about a launch: one declarative table per plugin or profile, and what its first matching row decides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from packaging.specifiers import SpecifierSet

from glm5_plugins import backends
from glm5_plugins.checkpoint import Checkpoint
from glm5_plugins.environment import Environment, Place, Window
from glm5_plugins.errors import ConfigurationError
from glm5_plugins.patching import Outcome, Verdict

# What SGLang 0.5.8-0.5.23 assumes for the fields that rules ask about, where nothing is given.
DEFAULTS: Mapping[str, Any] = {
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "moe_dp_size": 1,
    "nnodes": 1,
    "ep_num_redundant_experts": 0,
    "moe_a2a_backend": "none",
    "moe_runner_backend": "auto",
    "fp4_gemm_runner_backend": "auto",
    "kv_cache_dtype": "auto",
}


@dataclass(frozen=True)
class Launch:
    """What rules can ask about a launch.

    Args:
        env: Versions and GPU architecture.
        given: Values by field of `ServerArgs`: what the user gave, and what a profile adds to it.
    """

    env: Environment
    given: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """The value of a field: given, or SGLang's default."""
        value = self.given.get(name)
        return DEFAULTS.get(name) if value is None else value

    def having(self, **fields: Any) -> Launch:
        """The same launch with some fields given."""
        return Launch(self.env, {**self.given, **fields})

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """What the model folder says, where `model_path` is one."""
        return Checkpoint.of(self.given.get("model_path"))

    @property
    def architecture(self) -> str:
        """`sm90`, `sm100`, `sm120` for a family of GPUs; `none` without a GPU, `unknown` when nobody can say."""
        capability = self.env.compute_capability
        if capability is not None:
            return f"sm{capability[0]}0"
        return "none" if not self.env.elsewhere and self.env.cuda_devices == 0 else "unknown"

    def is_sglang(self, specifier: str) -> bool:
        """Whether the version is in a range; one that cannot be placed counts as newer than all that are known."""
        if not specifier:
            return True
        place = self.env.place(Window.parse(f"sglang{specifier}"))
        if place in (Place.UNKNOWN, Place.ABSENT):
            return not any(part.operator in ("<", "<=", "==", "~=") for part in SpecifierSet(specifier))
        return place is Place.INSIDE

    @property
    def is_nvfp4(self) -> bool:
        """Whether the weights are NVFP4."""
        return backends.is_nvfp4(self)

    @property
    def runner(self) -> str:
        """The MoE runner that SGLang ends up with."""
        return backends.moe_runner(self)

    @property
    def fp4_gemm(self) -> str:
        """The FP4 GEMM of dense layers that SGLang ends up with."""
        return backends.fp4_gemm(self)

    @property
    def version(self) -> str:
        """The version of SGLang, for messages."""
        return self.env.version_text("sglang") or "(not installed)"


class Does(str, Enum):
    """What a row decides."""

    ADD = "add"
    REFUSE = "refuse"
    WARN = "warn"
    NO_EFFECT = "no effect expected"
    NOT_NEEDED = "not needed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Rule:
    """One row: if everything to the right of `does` holds, it decides; `WARN` alone lets later rows decide too.

    Args:
        does: What follows.
        why: The reason, for a person; `{field}` stands for values of the launch, `{sglang}` for its version.
        mend: What to do about a refusal or warning.
        sglang: A range of versions, such as `>=0.5.9,<0.5.13`.
        arch: Families of GPUs, such as `sm120`.
        given: For each field the values it may have, defaults of SGLang included.
        when: A condition on the whole launch.
        add: Fields to add, for `ADD` and `NO_EFFECT`.
        source: Where in SGLang the rule stands.
    """

    does: Does
    why: str
    mend: str = ""
    sglang: str = ""
    arch: Collection[str] = ()
    given: Mapping[str, Collection[Any]] = field(default_factory=dict)
    when: Callable[[Launch], bool] | None = None
    add: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    def holds(self, launch: Launch) -> bool:
        """Whether this row is about the launch."""
        return (
            launch.is_sglang(self.sglang)
            and (not self.arch or launch.architecture in self.arch)
            and all(launch.get(name) in values for name, values in self.given.items())
            and (self.when is None or self.when(launch))
        )

    def say(self, text: str, launch: Launch) -> str:
        """Fill the values of a launch into a text."""
        return text.format_map(_Values(launch))


class _Values(dict[str, Any]):
    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.launch = launch

    def __missing__(self, name: str) -> Any:
        launch = self.launch
        known = {"sglang": f"SGLang {launch.version}", "arch": launch.architecture.upper()}
        if name in ("runner", "fp4_gemm"):
            return getattr(launch, name)
        return known.get(name, launch.get(name))


@dataclass(frozen=True)
class Decision:
    """What a table decides about a launch.

    Args:
        does: Never `WARN`.
        why: The reason.
        mend: What to do about a refusal.
        add: Fields to add.
        warnings: Reasons of the warnings on the way, each with what to do.
    """

    does: Does
    why: str
    mend: str = ""
    add: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[tuple[str, str]] = ()


def decide(rules: Sequence[Rule], launch: Launch) -> Decision:
    """Go down a table to the first row that decides.

    A refusal further down still wins over nothing: order the refusals first.
    """
    warnings: list[tuple[str, str]] = []
    for rule in rules:
        if not rule.holds(launch):
            continue
        why, mend = rule.say(rule.why, launch), rule.say(rule.mend, launch)
        if rule.does is Does.WARN:
            warnings.append((why, mend))
            continue
        return Decision(rule.does, why, mend, rule.add, warnings)
    return Decision(Does.NOT_APPLICABLE, "no rule is about this launch", warnings=warnings)


class Choice:
    """Server arguments of one plugin in this process: decides them, and remembers what came of it.

    Args:
        plugin: The plugin's name, for refusals.
    """

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin
        self._outcome: Outcome | None = None

    def make(self, decision: Decision) -> Mapping[str, Any]:
        """Return the fields to add.

        Raises:
            ConfigurationError: The table refuses the launch.
        """
        if decision.does is Does.REFUSE:
            raise ConfigurationError(f"{self.plugin} cannot be in force: {decision.why}.", decision.mend)
        reason = "; ".join([decision.why, *(f"beware: {why}" for why, _ in decision.warnings)])
        if decision.does is Does.NO_EFFECT:
            reason = f"in force, no effect expected: {reason}"
        verdicts = {Does.NOT_NEEDED: Verdict.NOT_NEEDED, Does.NOT_APPLICABLE: Verdict.NOT_APPLICABLE}
        self._outcome = Outcome(verdicts.get(decision.does, Verdict.APPLIED), reason)
        return decision.add

    @property
    def outcome(self) -> Outcome | None:
        """What came of it, once it has been made in this process."""
        return self._outcome

    def foreseen(self, rules: Sequence[Rule], env: Environment) -> Outcome | None:
        """What came of it; before anything is decided, what any launch comes to on this machine.

        Args:
            rules: Rows that look at nothing but the machine and what is installed.
            env: The machine and what is installed.
        """
        if self._outcome is not None:
            return self._outcome
        decision = decide(rules, Launch(env, {}))
        if decision.does is Does.REFUSE:
            return Outcome(Verdict.FAILED, decision.why, decision.mend)
        if decision.does is Does.NOT_NEEDED:
            return Outcome(Verdict.NOT_NEEDED, decision.why)
        return None
