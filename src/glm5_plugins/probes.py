"""Questions to upstream's source, for a version number that cannot answer: builds from source, forks, next releases."""

from __future__ import annotations

from dataclasses import dataclass

from glm5_plugins.environment import Environment
from glm5_plugins.patching import Probe


@dataclass(frozen=True)
class SourceHas:
    """Says `text` where the source has a target.

    Args:
        target: As in `Patch.target`.
        text: What it means that the target is there.
    """

    target: str
    text: str

    def __call__(self, env: Environment) -> str | None:
        """Return the text, or None."""
        return None if _lacks(self.target, env) else self.text

    def __str__(self) -> str:
        return f"`{self.target}` exists"


@dataclass(frozen=True)
class SourceLacks:
    """Says `text` where the source has none of some targets, though it has their package.

    Args:
        targets: As in `Patch.target`.
        text: What it means that they are gone.
    """

    targets: tuple[str, ...]
    text: str

    def __call__(self, env: Environment) -> str | None:
        """Return the text, or None."""
        packages = {target.partition(":")[0].partition(".")[0] for target in self.targets}
        if any(_lacks(package, env) for package in packages):
            return None
        return self.text if all(_lacks(target, env) for target in self.targets) else None

    def __str__(self) -> str:
        return "nothing of " + ", ".join(f"`{target}`" for target in self.targets) + " exists"


@dataclass(frozen=True)
class SourceSays:
    """Says `text` where the code of a target has a fragment in it; comments do not count.

    Args:
        target: As in `Patch.target`, or a module.
        fragment: Code as `ast.unparse` writes it.
        text: What it means that the fragment is there.
    """

    target: str
    fragment: str
    text: str

    def __call__(self, env: Environment) -> str | None:
        """Return the text, or None."""
        from glm5_plugins import source

        try:
            code = source.code(self.target, env.roots)
        except source.Missing:
            return None
        return self.text if self.fragment in code else None

    def __str__(self) -> str:
        return f"`{self.target}` has `{self.fragment}` in it"


@dataclass(frozen=True)
class AnyOf:
    """Says what the first of several probes says that says anything.

    Args:
        probes: Asked in this order.
    """

    probes: tuple[Probe, ...]

    def __call__(self, env: Environment) -> str | None:
        """Return the text, or None."""
        return next((said for probe in self.probes if (said := probe(env)) is not None), None)

    def __str__(self) -> str:
        return ", or ".join(map(str, self.probes))


def _lacks(target: str, env: Environment) -> bool:
    from glm5_plugins import source  # not in a server that never asks

    return source.lacks(target, roots=env.roots) is not None
