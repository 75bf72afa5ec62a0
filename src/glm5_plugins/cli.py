"""The command `glm5-plugins`: what there is, what it would do here, and what stands in its way.

Server processes never import this module. It imports neither SGLang, nor torch, nor FlashInfer: what it says of them
comes from their metadata and their source.

Exit status: 0 fine; 1 a requested plugin would not be in force, or a command could not do its work; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from glm5_plugins.errors import Glm5Error

FINE, NOT_IN_FORCE, USAGE = 0, 1, 2
ARCHITECTURES = ("sm90", "sm100", "sm103", "sm110", "sm120", "sm121")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    own = list(sys.argv[1:] if argv is None else argv)
    behind = own.index("--") if "--" in own else len(own)
    arguments = _parser().parse_args(own[:behind])
    arguments.words = [*getattr(arguments, "words", []), *own[behind + 1 :]]
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        status = run(arguments)
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _complain(error, USAGE)
    except Glm5Error as error:
        return _complain(error, NOT_IN_FORCE)
    except BrokenPipeError:  # `glm5-plugins list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE


class UsageError(Glm5Error):
    """The command line names something that does not exist."""


def _complain(error: Glm5Error, status: int) -> int:
    print(f"glm5-plugins: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="glm5-plugins",
        description="What the plugins named in GLM5_PLUGINS do, and whether they would be in force here.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(run=run)
        return added

    command("list", _list, "List all plugins, with their verdict on this installation.")
    explain = command("explain", _explain, "Say all about one plugin or profile: why, versions, options, rules.")
    explain.add_argument("name", metavar="NAME", help="a name that `glm5-plugins list` or `profiles` shows")
    check = command("check", _check, "Hold a launch command against a version of SGLang: -- python -m sglang…")
    launch = command("launch", _launch, "Start a server with a profile: --profile NAME -- --port 30000 …")
    for one in (check, launch):
        one.add_argument("--profile", metavar="NAME", help="a name that `glm5-plugins profiles` shows, or a path")
        one.add_argument("--arch", choices=ARCHITECTURES, help="the GPU; else the profile's, or this machine's")
    check.add_argument("--sglang", metavar="VERSION", help="else that of the container image, or the installed one")
    check.add_argument("words", nargs="*", metavar="COMMAND", help="behind --, or in one text; else standard input")
    launch.add_argument("--print", action="store_true", help="print the whole command instead of running it")
    command("profiles", _profiles, "List the profiles: launches that people really run.")
    command("doctor", _doctor, "Check this installation and the variables set; status 1 if something is wrong.")
    command("env", _env, "List all GLM5_* variables, their values and where those come from.")
    command("trace", _trace, "Try whether torch.compile can trace the FP4 path here, without plugins and with them.")
    command("enable", _enable, "Write the .pth line that brings the layer into every process of any SGLang.")
    command("disable", _disable, "Remove the .pth line.")
    from glm5_plugins.warmup import command as warmup

    text = "Build FlashInfer's FP4 modules beforehand, on a machine with or without a GPU, or a folder of them to ship."
    warmup.add_arguments(command("warmup", _warmup, text))
    return parser


# --- commands ------------------------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace) -> int:
    from glm5_plugins import doctor
    from glm5_plugins.environment import Environment
    from glm5_plugins.manager import PluginManager

    env, requested = Environment(), doctor.requested()
    rows = [doctor.examine_plugin(name, env, requested) for name in PluginManager.known()]
    bad = any(row.requested and not row.in_force for row in rows)
    if arguments.json:
        keys = ("name", "origin", "requested", "verdict", "reason", "summary")
        return _print_json([{key: getattr(row, key) for key in keys} for row in rows], bad)
    _print_table(
        ("", "PLUGIN", "FROM", "VERDICT HERE", "WHAT IT DOES"),
        [("*" if row.requested else "", row.name, row.origin, row.verdict, _about(row)) for row in rows],
    )
    if requested:
        print("\n* requested in GLM5_PLUGINS")
    return NOT_IN_FORCE if bad else FINE


def _about(row: Any) -> str:
    return str(row.summary if row.in_force or not row.reason else f"{row.summary} [{row.reason}]".strip())


def _explain(arguments: argparse.Namespace) -> int:
    from glm5_plugins import doctor
    from glm5_plugins.environment import Environment
    from glm5_plugins.errors import did_you_mean
    from glm5_plugins.manager import PluginManager
    from glm5_plugins.settings import profile

    known = PluginManager.known()
    if arguments.name in profile.known() or "/" in arguments.name:
        return _explain_profile(profile.load(arguments.name), arguments.json)
    if arguments.name not in known:
        names = [*known, *profile.known()]
        raise UsageError(f"There is no plugin or profile {arguments.name!r}.", did_you_mean(arguments.name, names))
    row = doctor.examine_plugin(arguments.name, Environment(), doctor.requested())
    bad = row.requested and not row.in_force
    if arguments.json:
        return _print_json(dataclasses.asdict(row), bad)
    print(f"{row.name} ({row.origin})\n")
    for paragraph in row.description.split("\n\n"):
        _print_text(paragraph, keep_lines=True)
        print()
    _print_fields(
        [
            ("verdict here", f"{row.verdict}: {row.reason}"),
            ("requested", "yes, in GLM5_PLUGINS" if row.requested else "no"),
            ("hooks", ", ".join(row.hooks)),
            ("needs", ", ".join(row.needs_plugins)),
            ("excludes", ", ".join(row.excludes_plugins)),
        ]
    )
    for patch in row.patches:
        print(f"\n{patch.kind} {patch.target}")
        _print_fields(
            [
                ("why", patch.why),
                ("verdict here", f"{patch.verdict}: {patch.reason}"),
                ("found at", patch.at),
                ("versions", ", ".join(patch.requires) or "all"),
                ("what ends it", patch.ends),
                ("relies on", ", ".join(patch.needs)),
                ("upstream", patch.upstream),
                ("fate", patch.fate),
            ]
        )
    if row.options:
        print("\nOptions")
        _print_options(row.options)
    return NOT_IN_FORCE if bad else FINE


def _explain_profile(profile: Any, as_json: bool) -> int:
    if as_json:
        return _print_json(profile.model_dump(mode="json"), False)
    print(f"{profile.name}\n\n{profile.summary}\n")
    _print_fields(
        [
            ("hardware", profile.hardware),
            ("SGLang", profile.sglang),
            ("models", ", ".join(profile.models)),
            ("plugins", ", ".join(profile.plugins)),
            ("options", ", ".join(f"{name}={value}" for name, value in profile.options.items())),
            ("from", ", ".join(profile.source)),
        ]
    )
    for part in profile.arguments:
        print(f"\nArguments{_when(part)}")
        _print_table((), [("", f"--{name.replace('_', '-')}", _value(value)) for name, value in part.add.items()])
    for part in profile.environment:
        print(f"\nVariables{_when(part)}" + (f": {part.why}" if part.why else ""))
        _print_table((), [("", name, value) for name, value in part.set.items()])
    for rule in profile.rules:
        print(f"\n{rule.level.capitalize()}{_when(rule)}")
        _print_fields([("what", rule.why), ("mend", rule.mend), ("source", rule.source)])
    return FINE


def _when(part: Any) -> str:
    """The conditions of a part of a profile, for a heading."""
    words = [f"SGLang {part.sglang}"] if part.sglang else []
    words += [" or ".join(part.architecture).upper()] if part.architecture else []
    words += [f"{name} {' or '.join(map(str, values))}" for name, values in part.given.items()]
    words += [f"no {name}" for name in part.absent]
    return f" for {', '.join(words)}" if words else ""


def _value(value: Any) -> str:
    return "" if value is True else value if isinstance(value, str) else json.dumps(value)


def _profiles(arguments: argparse.Namespace) -> int:
    from glm5_plugins.settings import profile

    found = list(profile.bundled())
    if arguments.json:
        return _print_json([one.model_dump(mode="json") for one in found], False)
    _print_table(
        ("PROFILE", "SGLANG", "HARDWARE", "WHAT IT IS"),
        [(one.name, one.sglang, one.hardware, one.summary) for one in found],
    )
    return FINE


def _check(arguments: argparse.Namespace) -> int:
    from glm5_plugins import checking, command

    words = arguments.words
    if not words and not sys.stdin.isatty():
        words = [sys.stdin.read() + " "]
    if not words:
        raise UsageError("There is no command to check.", "glm5-plugins check -- python -m sglang.launch_server …")
    judged = checking.judge(command.read(words), arguments.sglang, arguments.arch, arguments.profile)
    if arguments.json:
        return _print_json(dataclasses.asdict(judged) | {"sound": judged.sound}, not judged.sound)
    gpu = "a GPU that nobody named (--arch)" if judged.architecture == "unknown" else judged.architecture.upper()
    print(f"Held against SGLang {judged.asked}, for {gpu}")
    if judged.rules_of:
        print(f"Rules of {', '.join(judged.rules_of)}")
    for plugin, outcome in judged.outcomes.items():
        print(f"Plugin {plugin}: {outcome}")
    _print_findings(judged.remarks)
    for title, rows in (
        ("Would be added", [("", flag, f"by {who}") for who, flag in judged.added]),
        ("Would be set", [("", f"{name}={value}", "") for name, value in judged.variables.items()]),
    ):
        if rows:
            print(f"\n{title}")
            _print_table((), rows)
    if judged.sound:
        print("\nNothing here stops the launch.")
    return FINE if judged.sound else NOT_IN_FORCE


def _launch(arguments: argparse.Namespace) -> int:
    from glm5_plugins import checking, command

    typed = command.read(arguments.words or ["--"])
    judged = checking.judge(typed, None, arguments.arch, arguments.profile)
    errors = [remark for remark in judged.remarks if remark.level == "error"]
    for remark in errors:
        _complain(Glm5Error(remark.what, remark.mend), NOT_IN_FORCE)
    if arguments.json:
        return _print_json(dataclasses.asdict(judged) | {"sound": judged.sound}, bool(errors))
    if arguments.print:
        print(judged.command)
    if errors:
        return NOT_IN_FORCE
    if arguments.print:
        return FINE
    environment = {**judged.variables, **os.environ, **typed.environment}
    if arguments.profile:
        environment["GLM5_PROFILE"] = arguments.profile
    sys.stdout.flush()
    os.execvpe(typed.program[0], typed.program, environment)


def _env(arguments: argparse.Namespace) -> int:
    from glm5_plugins import doctor

    options = doctor.all_options()
    findings = [*doctor.unknown_variables(), *doctor.bad_values()]
    if arguments.json:
        document = {
            "variables": [dataclasses.asdict(option) for option in options],
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        return _print_json(document, bool(findings))
    _print_options(options)
    _print_findings(findings)
    return NOT_IN_FORCE if findings else FINE


def _doctor(arguments: argparse.Namespace) -> int:
    from glm5_plugins import doctor

    diagnosis = doctor.examine()
    if arguments.json:
        document = dataclasses.asdict(diagnosis) | {"healthy": diagnosis.healthy}
        return _print_json(document, not diagnosis.healthy)
    print("Versions")
    versions = diagnosis.versions.items()
    _print_table((), [("", name, version or "not installed") for name, version in versions])
    print("\nWays in")
    _print_table((), [("", way.name, "yes" if way.open else "no", way.detail) for way in diagnosis.ways])
    print("\nProcesses")
    _print_table(
        (),
        [("", p.role, "by " + " and ".join(p.by) if p.by else "not reached", p.detail) for p in diagnosis.processes],
    )
    print("\nRequested plugins")
    if not diagnosis.plugins:
        wanted = os.environ.get("GLM5_PLUGINS", "").strip()
        print("  none: GLM5_PLUGINS " + ("names no known plugin" if wanted else "is not set"))
    for row in diagnosis.plugins:
        _print_table((), [("", row.name, row.verdict, row.reason)])
        _print_table((), [("", "", p.target, p.verdict, p.at or p.reason) for p in row.patches])
    if diagnosis.others:
        print("\nOther SGLang plugins")
        _print_table((), [("", other) for other in diagnosis.others])
    _print_findings(diagnosis.findings)
    if diagnosis.healthy and diagnosis.plugins:
        print("\nEvery requested plugin would be in force.")
    return FINE if diagnosis.healthy else NOT_IN_FORCE


def _trace(arguments: argparse.Namespace) -> int:
    from glm5_plugins import doctor, trace
    from glm5_plugins.environment import Environment

    requested, env = doctor.requested(), Environment()
    versions = {name: env.version_text(name) for name in ("sglang", "flashinfer-python", "torch")}
    tried = []
    if not arguments.json:
        print(f"{', '.join(f'{name} {version}' for name, version in versions.items())}; on the CPU, as for SM120")
    for attempt in trace.attempts(requested):
        tried.append(attempt)
        if not arguments.json:
            _print_attempt(attempt)
    asked = next(one for one in reversed(tried) if list(one.plugins) == list(requested))
    cure = tried[-1] if tried[-1] is not asked and tried[-1].fine else None
    if arguments.json:
        document = {
            "versions": versions,
            "traces": asked.fine,
            "attempts": [dataclasses.asdict(one) for one in tried],
            "cure": list(cure.plugins) if cure else None,
        }
        return _print_json(document, not asked.fine)
    if cure is not None:
        print(f"\nCure, as tried: GLM5_PLUGINS={','.join(cure.plugins)}")
    return FINE if asked.fine else NOT_IN_FORCE


def _print_attempt(attempt: Any) -> None:
    operators = ", ".join(attempt.operators)
    said = {
        "traces": f"traces as one graph, with {operators}",
        "breaks": "traces as several graphs, with the FP4 call between them",
        "stops": f"Dynamo stops: {attempt.error}",
    }
    print(f"\nGLM5_PLUGINS={','.join(attempt.plugins)}")
    _print_table((), [("", said.get(attempt.outcome, f"{attempt.outcome}: {attempt.error}"))])
    for number, frame in enumerate(attempt.frames, 1):
        at = "it stops here" if number == len(attempt.frames) else "through"
        _print_table((), [("", "", at.ljust(13), str(frame))])


def _enable(arguments: argparse.Namespace) -> int:
    from glm5_plugins import doctor, enable

    changed = enable.enable()
    notes = doctor.worth_of_line()
    if arguments.json:
        return _print_json({"path": enable.path(), "changed": changed, "note": notes}, False)
    print(enable.path())
    _print_text("Written." if changed else "It was there already.", stream=sys.stderr)
    _print_text(notes, stream=sys.stderr)
    return FINE


def _disable(arguments: argparse.Namespace) -> int:
    from glm5_plugins import enable

    changed = enable.disable()
    if arguments.json:
        return _print_json({"path": enable.path(), "changed": changed}, False)
    print(enable.path())
    _print_text("Removed." if changed else "It was not there.", stream=sys.stderr)
    return FINE


def _warmup(arguments: argparse.Namespace) -> int:
    from glm5_plugins.warmup import command

    return FINE if command.run(arguments) else NOT_IN_FORCE


# --- plain text ----------------------------------------------------------------------------------------------


def _width() -> int | None:
    """Columns to wrap at; None for a pipe, where one row is one line."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return max(40, shutil.get_terminal_size().columns)
    return None


def _print_json(document: Any, bad: bool) -> int:
    print(json.dumps(document, indent=2, default=str))
    return NOT_IN_FORCE if bad else FINE


def _print_text(text: str, stream: TextIO | None = None, keep_lines: bool = False) -> None:
    width = _width()
    indented = any(line.startswith(" ") for line in text.splitlines())
    if width is not None and not (keep_lines and indented):
        text = textwrap.fill(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)
    print(text, file=stream or sys.stdout)


def _print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns; the last one wraps below itself where the width is known."""
    table = [tuple(heads), *map(tuple, rows)] if heads else [*map(tuple, rows)]
    if not table:
        return
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]) - 1)]
    width = _width()
    for row in table:
        head = "".join(cell.ljust(size) + "  " for cell, size in zip(row, widths, strict=False))
        tail = " ".join(row[-1].split())
        if width is None:
            print((head + tail).rstrip())
            continue
        if width - len(head) < 20:  # too narrow for another column
            print(head.rstrip())
            head, indent = " " * 8, 8
        else:
            indent = len(head)
        room = max(20, width - indent)
        lines = textwrap.wrap(tail, room, break_long_words=False, break_on_hyphens=False) or [""]
        print((head + lines[0]).rstrip())
        for line in lines[1:]:
            print(" " * indent + line)


def _print_fields(fields: Iterable[tuple[str, str]]) -> None:
    _print_table((), [("", name, text) for name, text in fields if text])


def _print_options(options: Iterable[Any]) -> None:
    _print_table(
        ("VARIABLE", "TYPE", "VALUE", "FROM", "DEFAULT", "WHAT IT IS"),
        [(o.variable, o.type, o.value, o.source, o.default, o.error or o.description) for o in options],
    )


def _print_findings(findings: Iterable[Any]) -> None:
    for finding in findings:
        print()
        _print_table((), [(f"{finding.level}:", finding.what)])
        if finding.mend:
            _print_table((), [(" " * (len(finding.level) + 1), finding.mend)])


if __name__ == "__main__":
    sys.exit(main())
