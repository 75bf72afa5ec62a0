"""Server arguments: what the user gave, however it was spelled, and flags added where nothing was given."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from glm5_plugins.errors import ConfigurationError, did_you_mean, stop

# SGLang up to 0.5.13 parses these under other names than its fields have, and renames them afterwards.
_FIELD_OF_DESTINATION = {
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "expert_parallel_size": "ep_size",
    "attention_context_parallel_size": "attn_cp_size",
    "moe_data_parallel_size": "moe_dp_size",
}

# What a `--config` file switches off, by parser: SGLang drops `flag: false` when it merges the file.
_switched_off: WeakKeyDictionary[argparse.ArgumentParser, dict[str, Any]] = WeakKeyDictionary()

Additions = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def add_where_absent(parser: argparse.ArgumentParser, additions: Additions) -> None:
    """Make `parser` add arguments when it parses a command line.

    SGLang merges a `--config` file into the command line before it parses, so one look at what reaches the parser
    sees everything: `--flag=value`, aliases, prefixes and the file. What the file switches off does not reach it:
    `note_file` remembers that.

    Args:
        parser: A parser that has SGLang's arguments.
        additions: From what the user gave to what is to be added, both by field name of `ServerArgs`.

    Raises:
        SystemExit: When it parses: something that is to be added has no flag in this parser.
    """
    parse = parser.parse_known_args

    def parse_with_additions(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        argv = list(sys.argv[1:] if args is None else args)
        extra = additions({**_switched_off.get(parser, {}), **given(parser, parse, argv)})
        try:
            spelled = flags(parser, extra)
        except ConfigurationError as error:
            raise stop(error) from None
        return parse([*argv, *spelled], namespace)

    setattr(parser, "parse_known_args", parse_with_additions)  # noqa: B010 (mypy sees a method)


def note_file(parser: argparse.ArgumentParser, config: Mapping[str, Any]) -> None:
    """Remember the flags without a value that a `--config` file sets to false.

    Args:
        parser: The parser that the file is merged for.
        config: The file's content; keys are spelled as flags, or as fields.
    """
    off = {str(key).replace("-", "_") for key, value in config.items() if value is False}
    for action in parser._actions:
        names = {action.dest, *(option.lstrip("-").replace("-", "_") for option in action.option_strings)}
        if action.nargs == 0 and names & off:
            _switched_off.setdefault(parser, {})[field_of(action.dest)] = False


def given(
    parser: argparse.ArgumentParser, parse: Callable[[Sequence[str]], Any], argv: Sequence[str]
) -> dict[str, Any]:
    """Return the values that `argv` gives, by field name, without any default.

    Raises:
        SystemExit: The parser refuses the command line, with its own message.
    """
    actions = [(action, action.default, action.required) for action in parser._actions]
    defaults = dict(parser._defaults)
    try:
        parser._defaults.clear()
        for action, _, _ in actions:
            action.default = argparse.SUPPRESS
            action.required = False
        return {field_of(name): value for name, value in vars(parse(argv)[0]).items()}
    finally:
        for action, default, required in actions:
            action.default, action.required = default, required
        parser._defaults.update(defaults)


def field_of(destination: str) -> str:
    """The field of `ServerArgs` that a destination of the parser fills."""
    return _FIELD_OF_DESTINATION.get(destination, destination)


def flags(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> list[str]:
    """Spell values by field name as flags of this parser.

    Raises:
        ConfigurationError: The parser has no such field, or cannot express the value.
    """
    by_field: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        if action.option_strings:
            by_field.setdefault(field_of(action.dest), []).append(action)
    spelled: list[str] = []
    for field, value in values.items():
        if field not in by_field:
            raise ConfigurationError(
                f"The server argument {field!r}, which a plugin or profile wants, is none of this SGLang.",
                did_you_mean(field, by_field, "`python -m sglang.launch_server --help`"),
            )
        spelled += _spell(by_field[field], field, value)
    return spelled


def _spell(actions: Sequence[argparse.Action], field: str, value: Any) -> list[str]:
    for action in actions:
        flag = max(action.option_strings, key=len)
        if action.nargs == 0:
            if isinstance(action, argparse.BooleanOptionalAction):
                no = next(option for option in action.option_strings if option.startswith("--no-"))
                yes = next(option for option in action.option_strings if not option.startswith("--no-"))
                return [yes if value else no]
            if action.const == value:
                return [flag]
            continue
        if isinstance(value, (list, tuple)):
            return [flag, *map(str, value)]
        return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    if any(action.default == value for action in actions):
        return []
    raise ConfigurationError(
        f"{field}={value!r}, which a plugin or profile wants, cannot be said with the flags of this SGLang.",
        "Take the plugin out of GLM5_PLUGINS, or the line out of the profile.",
    )
