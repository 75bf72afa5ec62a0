"""Arbitrary input ends in a value or in a clear error of two lines, never in a traceback.

200 examples each, the same every time; under `HYPOTHESIS_PROFILE=nightly` 10,000, others every time. What reads a text
of a user's gets a line in `READERS`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from glm5_plugins.settings import profile
from glm5_plugins.settings.model import HostSettings, read, variables_of

from glm5_plugins import ConfigurationError, Patch, PluginSettings, arguments, checking, command, merging, metrics
from glm5_plugins.agreement import Agreement, Member, differences, digest, in_words, refusal
from glm5_plugins.bootstrap import check_variables
from glm5_plugins.cli import main
from glm5_plugins.diagnosis.reading import NotText, diagnose_file
from glm5_plugins.environment import Environment, Place, Window
from glm5_plugins.errors import Glm5Error, did_you_mean
from glm5_plugins.manager import PluginManager
from glm5_plugins.patching import Verdict
from glm5_plugins.report import Report, Row

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

COMMON = {
    "deadline": None,
    "database": None,
    # The fixtures that are in force only keep things away.
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
settings.register_profile("default", max_examples=200, derandomize=True, **COMMON)
settings.register_profile("nightly", max_examples=10_000, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# What the environment of a process can hold: any bytes but NUL, as Python decodes them.
variable_text = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",))),
    st.binary().map(lambda data: data.replace(b"\0", b"").decode("utf-8", "surrogateescape")),
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


class Options(PluginSettings, plugin="fuzzed"):
    """Options of every kind that plugins use."""

    count: int = 1
    seconds: float = 1.0
    switch: bool = False
    names: tuple[str, ...] = ()
    table: dict[str, int] = {}  # noqa: RUF012 (pydantic copies it)
    folder: Path = Path()


@contextlib.contextmanager
def in_two_lines() -> Iterator[None]:
    """Let a clear error pass: one that says what, and how to mend it, on a line each."""
    said: list[Glm5Error] = []
    try:
        yield
    except Glm5Error as error:
        said.append(error)
    assert all(error.what and len(str(error).splitlines()) <= 2 for error in said), str(said[0])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(exit_on_error=False)
    made.add_argument("--model-path", "--model", required=True)
    made.add_argument("--ep-size", "--expert-parallel-size", type=int, default=1)
    made.add_argument("--enable-mscclpp", action="store_true")
    made.add_argument("--radix-cache", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument("--cuda-graph-bs", type=int, nargs="+")
    made.add_argument("--override-args", default="{}")
    return made


@given(st.sampled_from([*variables_of(HostSettings), *variables_of(Options)]), variable_text)
@example("GLM5_PLUGINS", ",\n,")
@example("GLM5_FUZZED_TABLE", "[" * 2000)
@example("GLM5_FUZZED_COUNT", "9" * 5000)
def test_settings(variable, value):
    with mock.patch.dict(os.environ, {variable: value}), in_two_lines():
        read(HostSettings)
        read(Options)


@given(st.dictionaries(variable_text.map(lambda text: f"GLM5_{text}"), variable_text, max_size=3))
def test_names_of_variables(variables):
    with in_two_lines():
        check_variables(variables)


@given(st.lists(st.sampled_from(PluginManager.known()) | variable_text, max_size=4))
def test_names_of_plugins(names):
    with in_two_lines():
        PluginManager().load(list(dict.fromkeys(names)))  # as GLM5_PLUGINS is read


@given(variable_text, st.lists(variable_text))
def test_suggestions(name, known):
    assert did_you_mean(name, known)


@given(st.text())
@example("a:b.<locals>.c")
@example(":")
def test_targets(target):
    with in_two_lines():
        Patch(target, lambda old: old, "why")


@given(st.text(), st.text())
@example("1!2.0", "sglang>=0.5.9,<0.5.22")
@example("0.0.0.dev1+gbfefdc52d", "sglang>=0.5.9")
def test_versions_and_windows(version, window):
    env = Environment(versions={"sglang": version})
    assert env.public_version("sglang")
    assert isinstance(env.place(Window.parse("sglang>=0.5.9,<0.5.22")), Place)
    with contextlib.suppress(ValueError):
        Window.parse(window)


@given(st.lists(st.text() | st.sampled_from(["--model", "x", "--ep-size", "2", "--ep", "--no-radix-cache", "--"])))
def test_command_lines(argv):
    """Whatever the parser makes of it without the layer, it makes of it with the layer that adds nothing."""

    def outcome(made: argparse.ArgumentParser) -> object:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            try:
                return vars(made.parse_known_args(argv)[0])
            except (SystemExit, argparse.ArgumentError) as error:
                return type(error)

    layered = parser()
    arguments.add_where_absent(layered, lambda given: {})
    assert outcome(layered) == outcome(parser())


@given(st.dictionaries(st.text() | st.sampled_from(["ep_size", "cuda_graph_bs", "enable_mscclpp"]), plain, max_size=3))
def test_server_arguments_of_plugins(values):
    with in_two_lines():
        assert all(isinstance(flag, str) for flag in arguments.flags(parser(), values))


@given(st.lists(st.dictionaries(st.text(), st.text(), max_size=4), max_size=5))
def test_agreement(facts):
    members = [Member(rank, "host", rank, one) for rank, one in enumerate(facts)]
    found = differences(members)
    assert bool(found) == (len({digest(one) for one in facts}) > 1)
    assert len(str(refusal(Agreement("differs", in_words(found)))).splitlines()) == 2


rows = st.builds(Row, st.text(), st.text(), st.sampled_from(Verdict), st.text(), st.text())


@given(st.lists(rows, max_size=5), plain)
@example([], {"ranks": 1})
def test_reports_are_written_and_merged(tmp_path_factory, rows, more):
    folder = tmp_path_factory.mktemp("reports")
    assert set(metrics.verdicts(rows)) == {row.plugin for row in rows}
    document = {
        "layer": {"version": "1", "plugins": [row.plugin for row in rows]},
        "versions": {},
        "stage": "ready",
        "rows": [vars(row) for row in rows],
        "agreement": more if isinstance(more, dict) else {},
    }
    Report(folder).write("main", 1, document)
    (launch,), problems = merging.read(folder)
    assert problems == []
    assert json.dumps(launch.as_json())


@given(plain)
def test_reports_of_anything(document):
    with contextlib.suppress(ValueError):
        merging.Process.of(document)


@given(st.binary() | plain.map(lambda value: json.dumps(value).encode()), st.sampled_from([".json", ".jsonl"]))
def test_report_files_of_anything(tmp_path_factory, data, suffix):
    folder = tmp_path_factory.mktemp("reports")
    (folder / f"x{suffix}").write_bytes(data)
    found, problems = merging.read(folder)
    assert found == []
    assert all(problem.startswith(f"x{suffix}") for problem in problems)


def of_command_line(*head: str) -> Callable[[str], Any]:
    """A reader that is a command of `glm5-plugins` with the text for argument."""

    def run(text: str) -> None:
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            # Below a folder that does not exist, lest a made-up path hit something.
            assert main([*head, f"nowhere/{text}"]) in (0, 1, 2)
        assert len(errors.getvalue().rstrip("\n").split("\n")) <= 2, errors.getvalue()

    return run


def toml_of(text: str) -> None:
    """A profile from a path, with any content."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "made.toml"
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        profile.load(str(file))


def log_of(text: str) -> None:
    """A server's log, with any content."""
    with in_a_file(text) as file:
        try:
            found = diagnose_file(file)
        except NotText:
            return
        lines = file.read_text(encoding="utf-8", errors="replace").count("\n") + 1
    assert found.verdict in ("known", "unknown", "no failure")
    assert 0 <= found.line <= lines
    assert found.cause
    assert str(found)


def log_of_command_line(text: str) -> None:
    """The same, and what is printed of it."""
    log_of(text)
    errors, output = io.StringIO(), io.StringIO()
    with in_a_file(text) as file, contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
        status = main(["diagnose", str(file), str(file)])
    assert status in (0, 1, 2)
    assert len(errors.getvalue().splitlines()) == (2 if status == 2 else 0)
    assert output.getvalue().count(f"== {file}") == (0 if status == 2 else 2)


@contextlib.contextmanager
def in_a_file(text: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "made.log"
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        yield file


# Whatever reads a text that a user wrote: it returns, or raises a `Glm5Error`.
READERS: Mapping[str, Callable[[str], Any]] = {
    "GLM5_PROFILE": profile.load.__wrapped__,
    "a profile": toml_of,
    "a launch command": lambda text: command.read([text]),
    "glm5-plugins check": of_command_line("check", "--"),
    "glm5-plugins explain": of_command_line("explain"),
    "glm5-plugins report": of_command_line("report", "--json"),
    "glm5-plugins diagnose": of_command_line("diagnose"),
    "a log": log_of_command_line,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@given(text=variable_text)
@example(text="~no-such-user/x.toml")
@example(text="a\0b.toml")
@example(text="a = " + "[" * 3000)
def test_readers(reader, text):
    with in_two_lines():
        reader(text)


LOGS = Path(__file__).parent / "diagnosis/logs"
LOG_LINES = sorted({line for file in LOGS.rglob("*.log") for line in file.read_text(errors="replace").splitlines()})


@given(st.lists(st.sampled_from(LOG_LINES) | variable_text, max_size=40), st.sampled_from(["\n", "\r\n", "\r", "\0\n"]))
@example(["Traceback (most recent call last):", "ValueError"], "\n")
def test_logs_of_shuffled_lines(lines, end):
    """The lines of real failures in any order, and anything between them."""
    log_of(end.join(lines))


@given(st.sampled_from(LOG_LINES), st.data())
def test_a_log_line_with_a_slip(line, data):
    at = data.draw(st.integers(0, len(line)))
    length = data.draw(st.integers(0, 40))
    log_of(line[:at] + data.draw(variable_text) + line[at + length :])


WORDS = (
    *("python", "-m", "sglang.launch_server", "--model-path", "--tp", "8", "--ep-size=3", "--nope", "-", "--", "="),
    *("GLM5_PLUGINS=ep", "A=b", "docker", "run", "-e", "lmsysorg/sglang:v0.5.12", "'", '"', "\\", "\n", "$(x)", "|"),
    *("--json-model-override-args", "{", "--config", "/nowhere.yaml", "--speculative-algo", "numactl"),
    *(
        "$(",
        "${",
        "`",
        "# it's",
        "<b>",
        "> log",
        "2>&1",
        "\\ ",
        "bash -c",
        "'sglang serve --model X'",
        "export",
        ";",
        ")",
    ),
)


@given(st.lists(st.sampled_from(WORDS) | variable_text, max_size=12).map(" ".join))
def test_launch_commands(text):
    with in_two_lines():
        checking.judge(command.read([text]))


@given(st.lists(st.sampled_from(WORDS) | variable_text, max_size=12).map(" ".join))
def test_a_launch_that_is_written_reads_the_same(text):
    with in_two_lines():
        found = command.read([f"{text} sglang serve {text}"])
        again = command.read([f"{found.text} "])
        assert found.inside or not found.front or (again.front, again.flags) == (found.front, found.flags)


BUNDLED = (profile.FOLDER / "glm5-nvfp4-8x-rtx-pro-6000.toml").read_text()
VALUES = ("1", '"x"', "[]", "{}", "true", "[[1]]", "-1e400", "1979-05-27", "{ set = { A = 1 } }", '["a", 1]', "nan")
KEYS = (*profile.Profile.model_fields, "includes", "arguments.tp_size", "environment.A", "options.GLM5_EP_SIZE", "x")


@given(st.integers(0, len(BUNDLED)), st.integers(0, 40), st.text(max_size=8))
def test_a_profile_with_a_slip(at, length, text):
    with in_two_lines():
        toml_of(BUNDLED[:at] + text + BUNDLED[at + length :])


@given(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES), max_size=4))
def test_a_profile_of_wrong_types(entries):
    own = "".join(f"{key} = {value}\n" for key, value in entries.items())
    rest = "".join(line for line in BUNDLED.splitlines(True) if line.partition(" ")[0] not in entries)
    with in_two_lines():
        toml_of(own + rest)


@pytest.mark.parametrize("value", ["abc", "[1", "[" * 5000, '{"a": "x"}', "[]"])
def test_a_table_that_is_none_is_named(monkeypatch, value):
    monkeypatch.setenv("GLM5_FUZZED_TABLE", value)
    with pytest.raises(ConfigurationError, match=r"^GLM5_FUZZED_TABLE=.* is not valid: "):
        read(Options)


def test_an_error_is_of_two_lines_also_where_the_value_has_more(monkeypatch):
    monkeypatch.setenv("GLM5_ON_ERROR", "a\nb\u2028c")
    with pytest.raises(ConfigurationError) as caught:
        read(HostSettings)
    assert len(str(caught.value).splitlines()) == 2
