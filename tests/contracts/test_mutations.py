"""Take away, rename or move what a contract relies on, in a copy of a real release: it fails, and no other does."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

from glm5_plugins import source
from glm5_plugins.contract import Contract, check, contracts
from glm5_plugins.environment import Environment
from glm5_plugins.probes import SourceHas
from tests.contracts.conftest import ENVIRONMENTS, in_force, label

How = Literal["removed", "renamed", "moved"]


@dataclass(frozen=True)
class Mutation:
    """One change to one release."""

    contract: Contract
    env: Environment
    how: How | str
    parameter: str = ""

    def __str__(self) -> str:
        what = f"{self.parameter}-renamed" if self.parameter else self.how
        return f"{self.contract.owner}-{self.contract.target}-{what}-{label(self.env)}".replace(" ", "-")


def mutations() -> Iterator[Mutation]:
    """All changes to each contract, in the newest release at hand that it is for."""
    newest = {(one.owner, one.target, one.windows): (one, env) for env in ENVIRONMENTS for one in in_force(env)}
    for contract, env in newest.values():
        yield from (Mutation(contract, env, how) for how in ("removed", "renamed", "moved"))
        names = dict.fromkeys((*contract.needs, *contract.knows))
        yield from (Mutation(contract, env, "parameter", name) for name in names if takes(contract, env, name))


def takes(contract: Contract, env: Environment, name: str) -> bool:
    """Whether a target has a parameter in a release; it need not have all that are known."""
    return source.find(contract.target, env.roots).parameter(name) is not None


def definitions(target: str, env: Environment) -> set[tuple[Path, int]]:
    """Where a target is defined: more than one place where `if` or `try` decides."""
    try:
        found = source.find(target, env.roots)
    except source.Missing:
        return set()
    return {(one.file, one.line) for one in (found, *found.alternatives)}


@pytest.mark.parametrize("mutation", list(mutations()), ids=str)
def test_only_the_contracts_on_the_target_fail(mutation: Mutation, tmp_path: Path) -> None:
    contract, env = mutation.contract, mutation.env
    places = definitions(contract.target, env)
    affected = set(touched(mutation, places))
    mutated = apply(mutation, places, tmp_path)
    breaches = {(one.contract.owner, one.contract.target): str(one) for one in check(contracts(mutated), mutated)}
    assert breaches.keys() == affected
    ours = breaches[contract.owner, contract.target]
    assert contract.owner in ours
    assert contract.target in ours
    assert f"{contract.distribution} {env.version_text(contract.distribution)}" in ours
    if mutation.how == "renamed":
        assert f"{contract.name}_renamed" in ours
    if mutation.parameter in contract.needs:
        assert f"does not take `{mutation.parameter}`; did you mean `" in ours
    elif mutation.parameter:
        assert f"takes `{mutation.parameter}_renamed`, which is not known" in ours


def touched(mutation: Mutation, places: set[tuple[Path, int]]) -> Iterator[tuple[str, str]]:
    """The contracts on a definition, and those whose window ends because it is there."""
    here = in_force(mutation.env)
    for one in contracts(mutation.env):
        if one in here and definitions(one.target, mutation.env) & places:
            if not mutation.parameter or mutation.parameter in (*one.needs, *one.knows):
                yield one.owner, one.target
        elif (
            isinstance(one.outside, SourceHas)
            and not mutation.parameter
            and definitions(one.outside.target, mutation.env) & places
        ):
            yield one.owner, one.target


def apply(mutation: Mutation, places: set[tuple[Path, int]], folder: Path) -> Environment:
    """A copy of a release with one change: links to all files but those that are changed."""
    changed: dict[Path, str] = {}
    for file, line in places:
        changed[file] = edit(changed.get(file) or file.read_text(), line, mutation)
        if mutation.how == "moved":
            text = file.read_text()
            lines = text.splitlines()[slice(*span(statement(text, line)))]
            changed[file.with_name("moved_here.py")] = textwrap.dedent("\n".join(lines)) + "\n"
    roots = []
    for number, root in enumerate(mutation.env.roots or ()):
        inside = {file.relative_to(root): text for file, text in changed.items() if file.is_relative_to(root)}
        roots.append(overlay(root, folder / str(number), inside))
    return replace(mutation.env, roots=tuple(roots))


def edit(text: str, line: int, mutation: Mutation) -> str:
    """Change the statement on a line, keeping all other lines where they are."""
    node, lines = statement(text, line), text.splitlines()
    first, last = span(node)
    if mutation.parameter:
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        own = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        (argument,) = [one for one in own if one.arg == mutation.parameter]
        row, column = argument.lineno - 1, argument.col_offset
        lines[row] = lines[row][:column] + f"{mutation.parameter}_renamed" + lines[row][column + len(argument.arg) :]
    elif mutation.how == "renamed":
        row, name = line - 1, getattr(node, "name", mutation.contract.name)  # what it is imported by may differ
        lines[row] = lines[row].replace(name, f"{name}_renamed", 1)
    else:
        lines[first:last] = [" " * node.col_offset + "pass", *[""] * (last - first - 1)]
    return "\n".join(lines) + "\n"


def statement(text: str, line: int) -> ast.stmt:
    return next(one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.stmt) and one.lineno == line)


def span(node: ast.stmt) -> tuple[int, int]:
    """The first line of a statement, decorators included, and the one after its last; from 0."""
    assert node.end_lineno is not None
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))]) - 1, node.end_lineno


def overlay(root: Path, copy: Path, changed: dict[Path, str]) -> Path:
    """A folder that looks like `root`, with some files changed or added."""
    copy.mkdir(parents=True)
    here = {path.parts[0]: text for path, text in changed.items() if len(path.parts) == 1}
    below: dict[str, dict[Path, str]] = {}
    for path, text in changed.items():
        if len(path.parts) > 1:
            below.setdefault(path.parts[0], {})[path.relative_to(path.parts[0])] = text
    for entry in root.iterdir():
        if entry.name in below:
            overlay(entry, copy / entry.name, below[entry.name])
        elif entry.name not in here:
            (copy / entry.name).symlink_to(entry)
    for name, text in here.items():
        (copy / name).write_text(text)
    return copy
