"""Server arguments: what counts as given, however it was spelled, and how an addition is spelled."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import pytest

from glm5_plugins import arguments


class Renaming(argparse.Action):
    """As SGLang retires a flag: it fills the field of the new one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """Spelled as in SGLang, old and new."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", type=int, default=1)  # up to 0.5.13
    parser.add_argument("--expert-parallel-size", "--ep-size", "--ep", type=int, default=1)
    parser.add_argument("--speculative-algorithm", choices=["EAGLE", "NEXTN"])
    parser.add_argument("--json-model-override-args", default="{}")
    parser.add_argument("--dsa-prefill-backend")
    parser.add_argument("--nsa-prefill-backend", dest="dsa_prefill_backend", action=Renaming, default=None)
    parser.add_argument("--enable-mscclpp", action="store_true")
    parser.add_argument("--flashinfer-autotune-skip-ops", nargs="+")
    parser.add_argument("--enable-metrics", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--log-level", default="info")
    return parser


class Seen:
    """The additions of a test, and what they were asked about."""

    def __init__(self, wanted: Mapping[str, Any]) -> None:
        self.wanted = wanted
        self.given: Mapping[str, Any] = {}

    def __call__(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        self.given = given
        return {name: value for name, value in self.wanted.items() if name not in given}


def parse(parser: argparse.ArgumentParser, argv: list[str], **wanted: Any) -> tuple[argparse.Namespace, Seen]:
    seen = Seen(wanted)
    arguments.add_where_absent(parser, seen)
    return parser.parse_args(argv), seen


JSON = '{"index_topk_pattern": "FFSF SS", "a": [1, 2]}'


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--ep", "4"], "ep_size", 4),
        (["--ep=4"], "ep_size", 4),
        (["--expert-parallel-size=4"], "ep_size", 4),
        (["--expert-par", "4"], "ep_size", 4),
        (["--tp", "8"], "tp_size", 8),
        (["--speculative-algo", "NEXTN"], "speculative_algorithm", "NEXTN"),
        (["--speculative-algo=EAGLE"], "speculative_algorithm", "EAGLE"),
        (["--json-model-override-args", JSON], "json_model_override_args", JSON),
        ([f"--json-model-override-args={JSON}"], "json_model_override_args", JSON),
        (["--nsa-prefill-backend", "trtllm"], "dsa_prefill_backend", "trtllm"),
        (["--enable-mscclpp"], "enable_mscclpp", True),
        (["--no-enable-metrics"], "enable_metrics", False),
        (["--log-level", "info"], "log_level", "info"),
        (["--flashinfer-autotune-skip-ops", "a", "b"], "flashinfer_autotune_skip_ops", ["a", "b"]),
    ],
)
def test_given_is_recognised(parser: argparse.ArgumentParser, argv: list[str], field: str, value: object) -> None:
    """Case 15: another flag is never added beside the user's own, even when it gives the default."""
    other = {"log_level": "debug", "enable_metrics": True, "enable_mscclpp": True}.get(field, "none of this")
    _, seen = parse(parser, ["--model", "X", *argv], **{field: other})
    assert seen.given == {"model_path": "X", field: value}


def test_nothing_but_what_was_given_is_reported(parser: argparse.ArgumentParser) -> None:
    _, seen = parse(parser, ["--model", "X"])
    assert seen.given == {"model_path": "X"}


def test_the_parser_is_as_it_was(parser: argparse.ArgumentParser) -> None:
    """Defaults and required flags are looked past, not lost."""
    namespace, _ = parse(parser, ["--model", "X"])
    assert namespace.log_level == "info"
    with pytest.raises(SystemExit):
        parser.parse_args([])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ep_size", 8),
        ("enable_mscclpp", True),
        ("enable_mscclpp", False),
        ("enable_metrics", False),
        ("flashinfer_autotune_skip_ops", ["a", "b"]),
        ("dsa_prefill_backend", "trtllm"),
        ("speculative_algorithm", "NEXTN"),
    ],
)
def test_an_addition_arrives(parser: argparse.ArgumentParser, field: str, value: object) -> None:
    namespace, _ = parse(parser, ["--model", "X"], **{field: value})
    destination = "expert_parallel_size" if field == "ep_size" else field
    assert getattr(namespace, destination) == value


def test_an_object_is_spelled_as_json(parser: argparse.ArgumentParser) -> None:
    namespace, _ = parse(parser, ["--model", "X"], json_model_override_args={"a b": 1})
    assert json.loads(namespace.json_model_override_args) == {"a b": 1}


def test_a_field_that_this_sglang_lacks(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(SystemExit, match="enable_msclpp") as refused:
        parse(parser, ["--model", "X"], enable_msclpp=True)
    assert "Did you mean 'enable_mscclpp'?" in str(refused.value)


@pytest.mark.parametrize("key", ["enable-mscclpp", "enable_mscclpp"])
def test_what_a_config_file_switches_off_is_given(parser: argparse.ArgumentParser, key: str) -> None:
    """SGLang leaves `enable-mscclpp: false` out of the merged command line."""
    arguments.note_file(parser, {key: False, "tp-size": 8, "log-level": False})
    namespace, seen = parse(parser, ["--model", "X"], enable_mscclpp=True)
    assert seen.given == {"model_path": "X", "enable_mscclpp": False}
    assert namespace.enable_mscclpp is False
