"""What the layer relies on in upstream's source, patch by patch and seam by seam, checked against one release.

Inside the version windows of a contract the target is there with the parameters relied on, something uses it, and
`Patch.outside` has nothing to say. Outside of them upstream's source shows why: the target is gone, nothing uses it, or
`outside` or `unless` says what came in its place. A window that the source does not bear out is a breach.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from glm5_plugins import callers, seams, source
from glm5_plugins.environment import Environment, Place, Window
from glm5_plugins.manager import BUNDLED, PluginManager
from glm5_plugins.patching import Patch, Probe
from glm5_plugins.wheels import IMPORTED_AS

_DISTRIBUTIONS = {package: distribution for distribution, package in IMPORTED_AS.items()}


@dataclass(frozen=True)
class Contract:
    """One target, who relies on it, and for which versions; the fields are those of `Patch`."""

    owner: str
    target: str
    needs: tuple[str, ...]
    windows: tuple[Window, ...]
    outside: Probe | None = None
    unless: Probe | None = None
    knows: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the target."""
        return self.target.replace(":", ".").rpartition(".")[2]

    @property
    def distribution(self) -> str:
        """The distribution that the target is in."""
        package = self.target.partition(":")[0].partition(".")[0]
        return _DISTRIBUTIONS.get(package, package)


@dataclass(frozen=True)
class Breach:
    """One contract that does not hold in one release."""

    contract: Contract
    releases: str
    problem: str

    def __str__(self) -> str:
        return f"{self.contract.owner}: {self.contract.target} in {self.releases}: {self.problem}"


def contracts(env: Environment, plugins: Iterable[str] = BUNDLED) -> list[Contract]:
    """The contracts of the layer itself and of plugins, as they declare them in these surroundings."""
    found = [
        Contract("the layer", seam.target, seam.needs, (Window.parse(seam.requires),), seam.outside)
        for seam in seams.SEAMS
    ]
    found += [Contract("the layer", target, (), (Window.parse(seams.REQUIRES),)) for target in seams.RELIED_ON]
    for name in plugins:
        found += [of_patch(f"plugin {name!r}", patch) for patch in patches(name, env)]
    return found


def of_patch(owner: str, patch: Patch) -> Contract:
    """The contract that a patch is."""
    return Contract(
        owner, patch.target, tuple(patch.needs), patch.windows, patch.outside, patch.unless, tuple(patch.knows)
    )


def patches(name: str, env: Environment) -> list[Patch]:
    """The patches of one plugin, collected as a server would, with the plugins it needs."""
    names = [name]
    for one in names:
        names += [other for other in PluginManager.find(one).requires if other not in names]
    manager = PluginManager()
    manager.load(names)
    return [patch for owner, patch in manager.patches(env) if owner.name == name]


def example_options(name: str) -> dict[str, str]:
    """Variables that set each option of a plugin to its example, so that no patch is left out for want of one."""
    options = PluginManager.find(name).options
    if options is None:
        return {}
    prefix = options.model_config.get("env_prefix", "")
    fields = options.model_fields.items()
    return {f"{prefix}{field}".upper(): str(info.examples[0]) for field, info in fields if info.examples}


def check(every: Sequence[Contract], env: Environment) -> Iterator[Breach]:
    """Yield the contracts that do not hold in the releases of `env`; nothing of them is imported.

    A contract is passed over where the distribution that its target is in is not among them, or is too old for this
    project to look at.
    """
    about = [contract for contract in every if env.version_text(contract.distribution) is not None]
    lacking = {
        key: _lacking(*key, env)
        for key in dict.fromkeys((contract.target, contract.needs, contract.knows) for contract in about)
    }
    used = _used(about, env)
    for contract in about:
        places = {window: env.place(window) for window in contract.windows}
        judged = {window: place for window, place in places.items() if place is not Place.ABSENT}
        problem = _problem(contract, env, judged, lacking[contract.target, contract.needs, contract.knows], used)
        if problem is not None:
            names = dict.fromkeys([contract.distribution, *(window.requirement.name for window in judged)])
            yield Breach(contract, ", ".join(f"{name} {env.version_text(name)}" for name in names), problem)


def _lacking(target: str, needs: Sequence[str], knows: Sequence[str], env: Environment) -> str | None:
    """What the source does not show; at run time, where only the import can tell, a target gets the benefit of it."""
    try:
        source.find(target, env.roots)
    except source.Missing as missing:
        return str(missing)
    return source.lacks(target, needs, env.roots, knows)


def _used(about: Iterable[Contract], env: Environment) -> set[Contract]:
    """Those that something uses, by name: FlashInfer's by either package, SGLang's by itself."""
    found: set[Contract] = set()
    by_package: dict[str, list[Contract]] = {}
    for contract in about:
        if contract.name.startswith("__"):
            found.add(contract)  # Python itself calls the special methods
        else:
            by_package.setdefault(contract.target.partition(":")[0].partition(".")[0], []).append(contract)
    if env.version_text("sglang") is None:
        found.update(by_package.pop("flashinfer", ()))  # it is for SGLang to use
    for package, some in by_package.items():
        names = {contract.name for contract in some}
        uses = callers.first_uses(names, env.roots, tuple(dict.fromkeys((package, "sglang"))))
        found.update(contract for contract in some if contract.name in uses)
    return found


def _problem(
    contract: Contract, env: Environment, places: Mapping[Window, Place], lacking: str | None, used: set[Contract]
) -> str | None:
    unused = None if contract in used else "nothing uses it"
    outside = contract.outside(env) if contract.outside is not None else None
    cured = contract.unless(env) if contract.unless is not None else None
    beyond = [window for window, place in places.items() if place in (Place.BELOW, Place.ABOVE)]
    if beyond:
        if lacking or unused or outside or cured:
            return None
        return (
            f"is outside {' and '.join(map(str, beyond))}, yet everything relied on is there: "
            "widen `requires`, or say in `outside` what shows the difference"
        )
    if cured is not None:
        return None
    if lacking is not None:
        return lacking + _moved(contract, env)
    if unused is not None:
        return unused
    if outside is not None:
        return f"is inside its windows, but `outside` says: {outside}"
    return None


def _moved(contract: Contract, env: Environment) -> str:
    places = source.elsewhere(contract.name, contract.target.partition(":")[0], env.roots)
    return f"; `{contract.name}` is defined in {', '.join(places)}" if places else ""
