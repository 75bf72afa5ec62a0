"""Agreement of ranks: what counts as a difference, how it is said, and how ranks compare over gloo."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from glm5_plugins.settings.model import comparable
from pydantic import SecretStr

from glm5_plugins import PluginSettings
from glm5_plugins.agreement import (
    Agreement,
    Group,
    Member,
    compare,
    differences,
    digest,
    exchange,
    in_words,
    refusal,
    standing,
)
from glm5_plugins.errors import NotInForce
from glm5_plugins.patching import Verdict

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

FACTS = {"the version of sglang": "0.5.23", "GLM5_PLUGINS": "probe", "the verdict of probe on a:b": "applied"}


def member(rank: int, **changed: str) -> Member:
    return Member(rank, f"host{rank // 2}", 100 + rank, FACTS | changed)


def test_equal_ranks_do_not_differ():
    assert differences([member(rank) for rank in range(4)]) == []
    assert digest(FACTS) == digest(dict(reversed(FACTS.items())))
    assert digest(FACTS) != digest(FACTS | {"GLM5_PLUGINS": ""})


def test_the_odd_rank_is_named_first_with_host_and_value():
    found = differences([member(0), member(1), member(2), member(3, GLM5_PLUGINS="probe,ep")])
    assert in_words(found) == (
        "GLM5_PLUGINS is 'probe,ep' on rank 3 on host1 (pid 103); "
        "it is 'probe' on rank 0 on host0 (pid 100), rank 1 on host0 (pid 101), rank 2 on host1 (pid 102)"
    )


def test_of_two_ranks_the_first_is_the_measure():
    (found,) = differences([member(0), member(1, **{"the version of sglang": "0.5.22"})])
    assert [value for value, _ in found.values] == ["0.5.23", "0.5.22"]


def test_a_fact_that_a_rank_lacks_is_absent_there():
    (found,) = differences([member(0), Member(1, "host0", 101, {k: v for k, v in FACTS.items() if "verdict" not in k})])
    assert found.name == "the verdict of probe on a:b"
    assert [value for value, _ in found.values] == ["applied", "absent"]


def test_further_differences_are_counted_not_told():
    ranks = [member(0), member(1, **dict.fromkeys(FACTS, "x"), **{f"option {n}": "y" for n in range(8)})]
    text = in_words(differences(ranks))
    assert text.endswith("option 0, option 1, option 2 and 5 more")
    error = refusal(Agreement("differs", text))
    assert error.what.startswith("The ranks of this server differ: the version of sglang is 'x' on rank 1 on host0")
    assert "GLM5_AGREEMENT=off" in error.mend


@pytest.mark.parametrize(
    ("target", "verdict", "stands"),
    [
        ("a:b", Verdict.APPLIED, "applied"),
        ("a:b", Verdict.WAITING, "applied"),  # SGLang imports some modules in some ranks only
        ("a:b", Verdict.NOT_NEEDED, "not needed"),
        ("glm5_model_load", Verdict.NOT_NEEDED, "applied"),  # one rank builds for all
        ("glm5_model_load", Verdict.FAILED, "failed"),
        ("a:b", "dead", "dead"),
    ],
)
def test_what_a_verdict_says_across_ranks(target, verdict, stands):
    assert standing(target, verdict) == stands


class Options(PluginSettings, plugin="made_up"):
    """Options of a plugin that tests made up."""

    timeout_s: float = 30.0
    folder: Path = Path("/a")
    token: SecretStr = SecretStr("hunter2")


def test_paths_and_secrets_are_not_compared():
    assert comparable(Options()) == {"timeout_s": "30.0"}


@pytest.mark.parametrize("group", [None, Group(0, 1, None)])
def test_one_rank_has_nobody_to_differ_from(group):
    found = compare(group, FACTS, "host", 1)
    assert (found.state, found.reason) == ("not compared", "there is one rank")


RANK = """
import json, os, sys, time
from pathlib import Path
rank, size, store, timeout = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
changed, act = json.loads(sys.argv[5]), sys.argv[6]
if act == "without NumPy": sys.modules["numpy"] = None
from torch import distributed
from glm5_plugins import agreement
from glm5_plugins.errors import NotInForce, stop
distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
group = distributed.new_group(list(range(size)), backend="gloo")
# A rank that ends at once must not take the group from another that has not connected to all ranks yet.
Path(f"{store}.{rank}").touch()
while not all(Path(f"{store}.{other}").exists() for other in range(size)): time.sleep(0.01)
agreement.TIMEOUT_S = timeout
agreement.exchange.__defaults__ = (timeout,)
if act == "die": os._exit(9)
if act == "stay away": time.sleep(3 * timeout); os._exit(0)
try:
    found = agreement.compare(agreement.Group(rank, size, group), {"a": "1", "b": "2"} | changed, f"host{rank}", rank)
except NotInForce as error:
    raise stop(error)
print(json.dumps(found.as_json()), flush=True)
if act == "hold the GIL":
    sys.setswitchinterval(1000)
    until = time.monotonic() + 1.5
    while time.monotonic() < until: pass
if found.state == "differs": raise stop(agreement.refusal(found))
distributed.barrier(group)
"""


def ranks(tmp_path: Path, *acts: str, changed: dict[int, str] | None = None, timeout: float = 60.0, **env: str):
    """Run ranks as processes; return `(status, output, errors)` of each."""
    (tmp_path / "rank.py").write_text(RANK)
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", str(tmp_path / "rank.py")),
                *(str(rank), str(len(acts)), str(tmp_path / "store"), str(timeout)),
                *((changed or {}).get(rank, "{}"), act),
            ],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, act in enumerate(acts)
    ]
    try:
        told = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, out, err) for process, (out, err) in zip(started, told, strict=True)]


@needs_torch
def test_ranks_that_agree_go_on(tmp_path):
    for status, out, err in ranks(tmp_path, "compare", "compare", "compare"):
        assert status == 0, err
        assert '"state": "agreed"' in out


# Lets the threads of torch and gloo sleep whenever they have told others that something is done.
SLOW_THREADS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>
int pthread_cond_broadcast(pthread_cond_t *condition) {
    static int (*real)(pthread_cond_t *);
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_broadcast", "GLIBC_2.3.2");
    if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_broadcast");
    int result = real(condition);
    char name[32] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (strstr(name, "gloo")) usleep(300000);
    return result;
}
"""


@needs_torch
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_no_thread_of_gloo_needs_python_once_the_ranks_have_compared(tmp_path):
    """A thread that waits for the GIL while Python ends aborts the process: `terminate called`, status -6.

    Such a thread would be one that still has a tensor of this comparison, and is slower than the main thread.
    """
    (tmp_path / "slow.c").write_text(SLOW_THREADS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "slow.so", "slow.c", "-ldl"], cwd=tmp_path, check=True)
    acts = ("hold the GIL", "hold the GIL", "hold the GIL")
    for status, out, err in ranks(tmp_path, *acts, changed={2: '{"b": "3"}'}, LD_PRELOAD=str(tmp_path / "slow.so")):
        assert '"state": "differs"' in out
        assert status == 1, err


@needs_torch
def test_ranks_compare_without_numpy(tmp_path):
    for status, out, err in ranks(tmp_path, "without NumPy", "without NumPy"):
        assert status == 0, err
        assert '"state": "agreed"' in out


@needs_torch
def test_a_rank_that_differs_stops_every_rank(tmp_path):
    for status, out, err in ranks(tmp_path, "compare", "compare", "compare", changed={2: '{"b": "3"}'}):
        assert status == 1
        assert '"state": "differs"' in out
        lines = [line for line in err.splitlines() if "glm5-plugins" in line]
        assert lines == [
            "glm5-plugins: The ranks of this server differ: b is '3' on rank 2 on host2 (pid 2); "
            "it is '2' on rank 0 on host0 (pid 0), rank 1 on host1 (pid 1)."
        ]


@needs_torch
def test_a_rank_that_never_comes_ends_in_a_time_out_that_names_it(tmp_path):
    began = time.monotonic()
    first, second, away = ranks(tmp_path, "compare", "compare", "stay away", timeout=20.0)
    assert time.monotonic() - began < 200
    for rank, (status, _, err) in enumerate((first, second)):
        assert status == 1
        assert f"Rank {rank} of 3 " in err
    assert "Rank 0 of 3 waited for all ranks" in first[2]
    assert "not all came within 20 s" in first[2]
    assert "Ranks 2 failed to pass monitoredBarrier" in first[2]
    # Rank 1 knows no more than that rank 0 has gone, and says so.
    assert "received errors while waiting for send/recv from rank 0" in second[2]
    assert away[0] == 0


@needs_torch
def test_a_rank_that_is_killed_stops_the_others_and_nobody_speaks_of_a_time_out(tmp_path):
    began = time.monotonic()
    first, _ = ranks(tmp_path, "compare", "die", timeout=200.0)
    assert time.monotonic() - began < 180
    assert first[0] == 1
    (line,) = [line for line in first[2].splitlines() if line.startswith("glm5-plugins: ")]
    assert "Rank 0 of 2 could not compare its plugins with those of the other ranks: " in line
    assert "not all came" not in line
    assert "200000 ms" not in line


@needs_torch
def test_the_time_that_torch_allowed_is_not_told_where_a_rank_was_lost_before_it_was_up(monkeypatch):
    from torch import distributed

    def fail(*args, **kwargs):
        raise RuntimeError("[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 600000 ms")

    monkeypatch.setattr(distributed, "monitored_barrier", fail)
    with pytest.raises(NotInForce) as caught:
        exchange(Group(0, 2, None), member(0))
    assert "of the other ranks: [Rank 0]: Ranks 1 failed to pass monitoredBarrier." in str(caught.value)
    with pytest.raises(NotInForce) as caught:
        exchange(Group(0, 2, None), member(0), timeout_s=0.0)
    assert "within 0 s: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 600000 ms." in str(caught.value)


@needs_torch
def test_whatever_else_goes_wrong_is_no_time_out(monkeypatch):
    from torch import distributed

    def fail(*args, **kwargs):
        raise RuntimeError("Something is not available.\nMore")

    monkeypatch.setattr(distributed, "monitored_barrier", fail)
    with pytest.raises(NotInForce) as caught:
        exchange(Group(0, 2, None), member(0))
    first, second = str(caught.value).splitlines()
    assert first.endswith("could not compare its plugins with those of the other ranks: Something is not available.")
    assert "GLM5_AGREEMENT=off" in second
