"""One launch after another, put to a plugin's table: no SGLang, no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from glm5_plugins.settings.model import take_from_profile

from glm5_plugins import Environment, Outcome
from glm5_plugins.errors import Glm5Error
from glm5_plugins.manager import PluginManager

VERSIONS = (
    *("0.5.9", "0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.13", "0.5.14", "0.5.15"),
    *("0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
)
CAPABILITY = {"sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0), "unknown": None}
NVFP4 = {"quantization": "modelopt_fp4"}


class Answer:
    """What a plugin made of a launch: fields to add, or the two lines of a refusal."""

    def __init__(self, added: dict[str, Any] | None, outcome: Outcome | None, error: Glm5Error | None) -> None:
        self.added = added
        self.outcome = outcome
        self.error = error

    @property
    def refused(self) -> str:
        """The refusal, empty when there is none."""
        return "" if self.error is None else str(self.error)

    @property
    def said(self) -> str:
        assert self.outcome is not None, self.refused
        return f"{self.outcome.verdict.value}: {self.outcome.reason}"

    def __repr__(self) -> str:
        return self.refused or f"{self.added} ({self.said})"


Ask = Callable[..., Answer]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """`ask("ep", "0.5.12", "sm120", tp_size=8)`; options as `_SIZE=2`."""

    def put(plugin: str, version: str, arch: str = "sm120", **fields: Any) -> Answer:
        options = {name: fields.pop(name) for name in list(fields) if name.startswith("_")}
        with monkeypatch.context() as patch:
            for name, value in options.items():
                patch.setenv(f"GLM5_{plugin.upper()}{name}", str(value))
            manager = PluginManager()
            manager.load([plugin])
            env = Environment({"sglang": version}, CAPABILITY[arch], elsewhere=True)
            try:
                added = {name: value for name, (_, value) in manager.server_args(env, fields).items()}
            except Glm5Error as error:
                return Answer(None, None, error)
            return Answer(added, manager.outcome(manager.plugins[0], env), None)

    return put


@pytest.fixture(autouse=True)
def _no_profile() -> Iterator[None]:
    """A profile that one test takes settings from is gone for the next."""
    yield
    take_from_profile({})
