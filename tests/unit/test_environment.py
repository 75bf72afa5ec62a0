"""The surroundings: versions against windows, roles, devices."""

from __future__ import annotations

import pytest
from packaging.version import Version

from glm5_plugins.environment import Environment, Place, Window


@pytest.mark.parametrize(
    ("version", "place"),
    [
        ("0.5.8.post1", Place.BELOW),
        ("0.5.9", Place.INSIDE),
        ("0.5.9.dev3+g1234", Place.UNKNOWN),
        ("0.5.10.post1", Place.INSIDE),
        ("0.5.12+cu130", Place.INSIDE),
        ("0.5.21.post1", Place.INSIDE),
        ("0.5.22.dev1+g1234", Place.UNKNOWN),
        ("0.5.22rc1", Place.UNKNOWN),
        ("0.5.15.dev1+g1234", Place.INSIDE),
        ("0.5.21.post2.dev70+g1234", Place.UNKNOWN),
        ("0.5.20.post2.dev70+g1234", Place.INSIDE),
        ("0.5.22", Place.ABOVE),
        ("0.5.22+cu130", Place.ABOVE),
        ("1.0", Place.ABOVE),
    ],
)
def test_place_of_a_version(version, place):
    assert Window.parse("sglang>=0.5.9,<0.5.22").place(Version(version)) is place


def test_a_local_part_does_not_make_a_mismatch():
    """Case 10 of the field: FlashInfer 0.6.16 against 0.6.16+cu130."""
    assert Window.parse("flashinfer-python==0.6.16").place(Version("0.6.16+cu130")) is Place.INSIDE


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (None, Place.ABSENT),
        ("0.0.0.dev1+gbfefdc52d", Place.UNKNOWN),
        ("0.1.dev1+gbfefdc52d", Place.UNKNOWN),
        ("fork-of-0.5.9", Place.UNKNOWN),
        ("0.5.9", Place.INSIDE),
    ],
)
def test_place_of_what_is_installed(text, place):
    assert Environment({"sglang": text}).place(Window.parse("sglang>=0.5.9")) is place


def test_the_installed_version_is_read_from_its_metadata():
    env = Environment()
    assert env.version("pluggy") == Version(env.version_text("pluggy"))
    assert env.version_text("no-such-distribution-here") is None


def test_role_of_each_process(run):
    out = run(
        """
        import multiprocessing
        from glm5_plugins.environment import Environment
        def run_scheduler_process(queue): queue.put(Environment().role.value)
        def run_detokenizer_process(queue): queue.put(Environment().role.value)
        def anything_else(queue): queue.put(Environment().role.value)
        roles = [Environment().role.value]
        context = multiprocessing.get_context("fork")
        for target in (run_scheduler_process, run_detokenizer_process, anything_else):
            queue = context.Queue()
            process = context.Process(target=target, args=(queue,))
            process.start(); roles.append(queue.get()); process.join()
        print(roles)
        """,
        options=("-W", "ignore"),
    ).stdout
    assert out.strip() == "['main', 'scheduler', 'detokenizer', 'worker']"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_devices_do_not_count(monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert Environment().cuda_devices == 0


@pytest.mark.parametrize(
    ("value", "names"), [("", None), (" , ", None), ("glm5", {"glm5"}), ("other, glm5", {"other", "glm5"})]
)
def test_sglang_plugins(monkeypatch, value, names):
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    assert Environment().sglang_plugins == names
