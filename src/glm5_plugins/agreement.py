"""Agreement: the ranks of one server compare what the layer does in each of them, and stop together where they differ.

Compared are *facts*, each a name and a text: versions, plugins and where they come from, their options, and what became
of every patch. Two ranks of one server that differ in any of them would compute different things, or wait for each
other for ever.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

from glm5_plugins.errors import NotInForce
from glm5_plugins.patching import Verdict

TIMEOUT_S = 600.0
"""Seconds that ranks wait for each other; where they meet, SGLang has just made them wait for each other too."""


@dataclass(frozen=True)
class Group:
    """All ranks of one server, as SGLang has grouped them.

    Args:
        rank: This process's place, from 0.
        size: How many ranks there are.
        handle: The `torch.distributed` group for communication between CPUs.
    """

    rank: int
    size: int
    handle: Any


@dataclass(frozen=True)
class Member:
    """One rank: who it is, and its facts by name."""

    rank: int
    host: str
    pid: int
    facts: Mapping[str, str]

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


class HasFacts(Protocol):
    """Whoever can be compared: facts by name, and a text that says who it is."""

    @property
    def facts(self) -> Mapping[str, str]:
        """What must be the same everywhere."""


@dataclass(frozen=True)
class Difference:
    """One fact that is not the same everywhere: its values, the commonest first, and who has which."""

    name: str
    values: Sequence[tuple[str, Sequence[HasFacts]]]

    def __str__(self) -> str:
        parts = [f"{value!r} on {', '.join(map(str, members))}" for value, members in reversed(self.values)]
        return f"{self.name} is {'; it is '.join(parts)}"


@dataclass(frozen=True)
class Agreement:
    """What came of comparing, as the report says it.

    Args:
        state: `agreed`, `differs`, `not compared`, or `off`.
        reason: Why it was not compared; what differs.
        digest: The first 12 hexadecimal digits of the SHA-256 of this rank's facts.
        rank: This rank, or None where there is no group.
        ranks: `{rank, host, pid}` of all ranks.
    """

    state: str
    reason: str = ""
    digest: str = ""
    rank: int | None = None
    ranks: Sequence[Mapping[str, Any]] = ()

    def as_json(self) -> dict[str, Any]:
        """The agreement as plain values."""
        return asdict(self)


NOT_REACHED = Agreement("not compared", "this process has not come to the point where ranks compare")


def standing(target: str, verdict: Verdict | str) -> str:
    """What a verdict says across ranks.

    A patch that waits for its module is as good as applied: SGLang imports some modules in some ranks only. What a
    plugin does in lifecycle hooks may be done by one rank for all (a build), and is not needed in the others then.

    Args:
        target: As in a row of the report: `package.module:attribute`, or the name of a hook.
        verdict: The verdict of that row.
    """
    value = Verdict(verdict)
    same = {Verdict.WAITING} if ":" in target else {Verdict.WAITING, Verdict.NOT_NEEDED}
    return Verdict.APPLIED.value if value in same else value.value


def digest(facts: Mapping[str, str]) -> str:
    """A short text that is equal where all facts are."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def differences(members: Sequence[HasFacts]) -> list[Difference]:
    """The facts in which members differ, in their order of declaration; a fact that one lacks is `absent` there."""
    names = dict.fromkeys(name for member in members for name in member.facts)
    found = []
    for name in names:
        by_value: dict[str, list[HasFacts]] = {}
        for member in members:
            by_value.setdefault(member.facts.get(name, "absent"), []).append(member)
        if len(by_value) > 1:
            # The commonest value first; of two as common, that of the first member.
            ordered = sorted(by_value.items(), key=lambda item: -len(item[1]))
            found.append(Difference(name, ordered))
    return found


def exchange(group: Group, mine: Member, timeout_s: float = TIMEOUT_S) -> list[Member]:
    """Tell every rank about this one, and learn about the others.

    Rank 0 collects and hands out, by sends and receives that run in the calling thread. A collective such as
    `all_gather_object` leaves gloo's own threads with tensors of Python's; one that comes to drop its tensor while this
    process exits, as it does where ranks differ, aborts the process.

    Args:
        group: A gloo group, in which every rank calls this at the same step of the start.
        mine: This rank.
        timeout_s: Seconds to wait for all ranks to come.

    Raises:
        NotInForce: A rank did not come, or was lost; the text names it where torch knows.
    """
    from torch import distributed

    began = time.monotonic()
    limit = timedelta(seconds=timeout_s)
    own = json.dumps(asdict(mine))
    try:
        # Names the ranks that are missing, which a receive that times out does not.
        distributed.monitored_barrier(group.handle, limit, wait_all_ranks=True)
        if group.rank == 0:
            texts = [own, *(_receive(group, rank, limit) for rank in range(1, group.size))]
            all_texts = json.dumps(texts)
            for rank in range(1, group.size):
                _send(group, rank, all_texts, limit)
        else:
            _send(group, 0, own, limit)
            texts = json.loads(_receive(group, 0, limit))
    except RuntimeError as error:
        late = time.monotonic() - began >= timeout_s
        raise _not_compared(group, timeout_s if late else None, str(error)) from error
    return [Member(**json.loads(text)) for text in texts]


def _send(group: Group, to: int, text: str, limit: timedelta) -> None:
    data = text.encode()
    for part in (len(data).to_bytes(8, "big"), data):
        _transfer("isend", group, to, bytearray(part), limit)


def _receive(group: Group, source: int, limit: timedelta) -> str:
    size = _transfer("irecv", group, source, bytearray(8), limit)
    return _transfer("irecv", group, source, bytearray(int.from_bytes(size, "big")), limit).decode()


def _transfer(way: str, group: Group, peer: int, data: bytearray, limit: timedelta) -> bytearray:
    """Send `data`, or fill it, and wait until that is done."""
    import torch
    from torch import distributed

    tensor = torch.frombuffer(data, dtype=torch.uint8)  # on the same memory, and with no need of NumPy
    if way == "isend":
        work = distributed.isend(tensor, group=group.handle, group_dst=peer)
    else:
        work = distributed.irecv(tensor, group=group.handle, group_src=peer)
    if work is not None:
        work.wait(limit)
    return data


def _not_compared(group: Group, time_up_after: float | None, account: str) -> NotInForce:
    account = next(iter(account.strip().splitlines()), "").rstrip(".")
    if time_up_after is not None:
        return NotInForce(
            f"Rank {group.rank} of {group.size} waited for all ranks to compare their plugins, and not all came "
            f"within {time_up_after:.0f} s: {account}.",
            "Set the same GLM5_* variables and install the same packages on every node; look in the log of the rank "
            "that is missing. GLM5_AGREEMENT=off on every rank starts without comparing.",
        )
    # Torch says "in 600000 ms" of a barrier that a lost rank ended at once: the time it allowed, not the time it took.
    account = re.sub(r" in \d+ ms$", "", account)
    return NotInForce(
        f"Rank {group.rank} of {group.size} could not compare its plugins with those of the other ranks: {account}.",
        "Look in the logs of the other ranks for what ended them. GLM5_AGREEMENT=off on every rank starts without "
        "comparing.",
    )


def backend_of(group: Group) -> str:
    """The name of the group's backend: `gloo`, or what SGLang uses in its place."""
    from torch import distributed

    return str(distributed.get_backend(group.handle))


def compare(group: Group | None, facts: Mapping[str, str], host: str, pid: int) -> Agreement:
    """Compare this rank's facts with those of all ranks.

    Returns:
        What came of it, with the state `differs` where they do; the caller stops the process then.

    Raises:
        NotInForce: A rank did not come.
    """
    if group is None or group.size == 1:
        return Agreement("not compared", "there is one rank", digest(facts), 0 if group is None else group.rank)
    backend = backend_of(group)
    if backend != "gloo":
        reason = f"SGLang's group of CPUs is made by {backend}, not gloo; ranks may join it later"
        return Agreement("not compared", reason, digest(facts), group.rank)
    members = exchange(group, Member(group.rank, host, pid, facts))
    found = differences(members)
    return Agreement(
        "differs" if found else "agreed",
        in_words(found),
        digest(facts),
        group.rank,
        tuple({"rank": member.rank, "host": member.host, "pid": member.pid} for member in members),
    )


def in_words(found: Sequence[Difference]) -> str:
    """The first difference, and the names of the others."""
    if not found:
        return ""
    others = [difference.name for difference in found[1:]]
    more = f"; they differ too in {_listed(others)}" if others else ""
    return f"{found[0]}{more}"


def refusal(agreement: Agreement) -> NotInForce:
    """The error of ranks that differ."""
    return NotInForce(
        f"The ranks of this server differ: {agreement.reason}.",
        "Make that the same on every node, or set GLM5_AGREEMENT=off on every rank to start all the same.",
    )


def _listed(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
