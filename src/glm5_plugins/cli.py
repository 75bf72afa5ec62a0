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
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, cast

from glm5_plugins.errors import Glm5Error

FINE, NOT_IN_FORCE, USAGE = 0, 1, 2
ARCHITECTURES = ("sm90", "sm100", "sm103", "sm110", "sm120", "sm121")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    _mend_streams()
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here it can still be told that this fails
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `glm5-plugins list | head`
        status = FINE
    except OSError as error:
        what = filter(None, [error.filename, error.strerror])
        status = _complain(": ".join(map(str, what)) or error, NOT_IN_FORCE)
    _give_up(sys.stdout)
    return status


def _run(own: list[str]) -> int:
    try:
        arguments = _read(own)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except UsageError as error:
        return _complain(error, USAGE)
    except Glm5Error as error:
        return _complain(error, NOT_IN_FORCE)


class UsageError(Glm5Error):
    """The command line names something that does not exist."""


def _complain(error: object, status: int) -> int:
    try:
        print(f"glm5-plugins: {error}", file=sys.stderr, flush=True)
    except OSError:  # nor can this be told then
        _give_up(sys.stderr)
    return status


def _give_up(stream: TextIO) -> None:
    """Let what is left in a stream go nowhere, or Python writes it at exit, and ends with a status of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _mend_streams() -> None:
    """Let no text be one that cannot be read or written, and let a closed stream be an empty one."""
    for name, mode, errors in (
        ("stdin", "r", "replace"),
        ("stdout", "w", "backslashreplace"),
        ("stderr", "w", "backslashreplace"),
    ):
        stream = getattr(sys, name)
        if stream is None:  # closed by `<&-` or `>&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


def _read(own: list[str]) -> argparse.Namespace:
    """Take the command line apart: of `check` and `launch`, what is behind -- is the server's."""
    takes_command = own[:1] in (["check"], ["launch"])
    behind = own.index("--") if takes_command and "--" in own else len(own)
    parser = _parser()
    arguments, unknown = parser.parse_known_args(own[:behind])
    if unknown:
        hint = "; put the server's command behind --" if takes_command and behind == len(own) else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    arguments.words = [*getattr(arguments, "words", []), *own[behind + 1 :]]
    return arguments


class _Version(argparse.Action):
    """Looks the version up only where it is asked for: that takes longer than the rest of the parser."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        from importlib.metadata import version

        print(f"glm5-plugins {version('glm5-plugins')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="glm5-plugins",
        description="What the plugins named in GLM5_PLUGINS do, and whether they would be in force here.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
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
    drift = command("drift", _drift, "Say whether the plugins would be in force after an upgrade, and what differs.")
    drift.add_argument("--sglang", metavar="VERSION", help="the SGLang to go to, or the path of its wheel")
    drift.add_argument("--flashinfer", metavar="VERSION", help="the FlashInfer; else the one it asks for")
    drift.add_argument(
        "--from", dest="old", metavar="VERSION", help="the SGLang to compare with, not the installed one"
    )
    drift.add_argument("--download", action="store_true", help="fetch wheels with pip where they are not at hand")
    report = command("report", _report, "Merge the reports of all processes, ranks and nodes into one table.")
    report.add_argument("path", metavar="FOLDER", help="the folder, or the `.jsonl` file, of GLM5_REPORT")
    command("trace", _trace, "Try whether torch.compile can trace the FP4 path here, without plugins and with them.")
    command("enable", _enable, "Write the .pth line that brings the layer into every process of any SGLang.")
    command("disable", _disable, "Remove the .pth line.")
    diagnose = command("diagnose", _diagnose, "Name the first cause in the log of a server that failed.")
    diagnose.add_argument("log", metavar="LOG", nargs="+", help="a server's log file; - reads standard input")
    campaign = command("campaign", _campaign, "Measure which plugins pay: run the arms of a plan, and report.")
    campaign.add_argument("plan", metavar="PLAN", nargs="?", help="a TOML file; see --example")
    campaign.add_argument("--out", metavar="FOLDER", help="where to keep it, or what to go on with")
    campaign.add_argument("--retry-failed", action="store_true", help="try again what failed")
    campaign.add_argument("--report-only", action="store_true", help="run nothing; PLAN may be a campaign's folder")
    campaign.add_argument("--example", action="store_true", help="print a plan to start from")
    compare = command("compare", _compare, "Compare two campaigns, such as before and after an upgrade.")
    compare.add_argument("first", metavar="A", help="the folder of a campaign")
    compare.add_argument("second", metavar="B", help="the folder of another")
    from glm5_plugins.warmup import command as warmup

    text = "Build FlashInfer's FP4 modules beforehand, on a machine with or without a GPU, or a folder of them to ship."
    warmup.add_arguments(command("warmup", _warmup, text))
    return parser


# --- commands ------------------------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace) -> int:
    from glm5_plugins import doctor
    from glm5_plugins.environment import Environment
    from glm5_plugins.manager import PluginManager

    env, (requested, findings) = Environment(), doctor.wanted()
    rows = [doctor.examine_plugin(name, env, requested) for name in PluginManager.known()]
    bad = bool(findings) or any(row.requested and row.stops_a_launch for row in rows)
    if arguments.json:
        keys = ("name", "origin", "requested", "verdict", "reason", "summary")
        return _print_json([{key: getattr(row, key) for key in keys} for row in rows], bad)
    _print_table(
        ("", "PLUGIN", "FROM", "VERDICT HERE", "WHAT IT DOES"),
        [("*" if row.requested else "", row.name, row.origin, row.verdict, _about(row)) for row in rows],
    )
    if requested:
        print("\n* requested in GLM5_PLUGINS")
    _print_findings(findings)
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
        near = did_you_mean(arguments.name, names, "`glm5-plugins list` or `profiles`")
        raise UsageError(f"There is no plugin or profile {arguments.name!r}.", near)
    row = doctor.examine_plugin(arguments.name, Environment(), doctor.requested())
    bad = row.requested and row.stops_a_launch
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
                ("knows only", ", ".join(patch.knows)),
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
    from glm5_plugins import checking, command, flags

    words = arguments.words
    if not words and not sys.stdin.isatty():
        words = [sys.stdin.read() + " "]
    if not words:
        raise UsageError("There is no command to check.", "glm5-plugins check -- python -m sglang.launch_server …")
    if arguments.sglang is not None and not flags.is_version(arguments.sglang):
        known = flags.versions()
        raise UsageError(
            f"--sglang {arguments.sglang!r} is no version.", f"Give one such as {known[0]} or {known[-1]}."
        )
    judged = checking.judge(command.read(words), arguments.sglang, arguments.arch, arguments.profile)
    if arguments.json:
        return _print_json(dataclasses.asdict(judged) | {"sound": judged.sound}, not judged.sound)
    gpu = "a GPU that nobody named (--arch)" if judged.architecture == "unknown" else judged.architecture.upper()
    print(f"Held against SGLang {judged.asked}, for {gpu}")
    if judged.rules_of:
        print(f"Rules of {', '.join(judged.rules_of)}")
    for plugin, outcome in judged.outcomes.items():
        print(f"Plugin {plugin}: {outcome}")
    _print_findings(judged.findings)
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

    typed = command.read(arguments.words or ["--"]).with_layer()
    if typed.inside:
        mend = "Give it as words of its own, in place of a text for `sh -c`."
        raise Glm5Error(f"The launch stands inside {typed.inside[:60]!r}.", mend)
    judged = checking.judge(typed, None, arguments.arch, arguments.profile)
    errors = [finding for finding in judged.findings if finding.level == "error"]
    for finding in errors:
        _complain(Glm5Error(finding.what, finding.mend), NOT_IN_FORCE)
    if arguments.json:
        return _print_json(dataclasses.asdict(judged) | {"sound": judged.sound}, bool(errors))
    if arguments.print:
        print(judged.command)
    if errors:
        return NOT_IN_FORCE
    if arguments.print:
        return FINE
    if typed.shell:
        mend = "Run what `glm5-plugins launch --print` prints, in a shell."
        raise Glm5Error(f"`glm5-plugins launch` runs one program, and {typed.shell!r} takes a shell.", mend)
    whole = checking.handed_on(typed, judged)
    environment = {**whole.leading, **os.environ, **typed.leading}
    if arguments.profile:
        environment["GLM5_PROFILE"] = arguments.profile
    program = whole.program
    sys.stdout.flush()
    try:
        os.execvpe(program[0], program, environment)
    except (OSError, ValueError) as error:  # ValueError: no word can have a null byte
        why = getattr(error, "strerror", None) or error
        raise Glm5Error(f"{program[0]} cannot be run: {why}.", "Give a program that is here, or its path.") from None


def _env(arguments: argparse.Namespace) -> int:
    from glm5_plugins import doctor

    options = doctor.all_options()
    findings = list(dict.fromkeys([*doctor.wanted()[1], *doctor.wrong_variables()]))
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
        idle = [row.name for row in diagnosis.plugins if not row.in_force]
        besides = f", besides {', '.join(idle)}" if idle else ""
        print(f"\nEvery requested plugin would be in force{besides}.")
    return FINE if diagnosis.healthy else NOT_IN_FORCE


def _drift(arguments: argparse.Namespace) -> int:
    import tempfile
    from pathlib import Path

    from glm5_plugins import doctor, drift
    from glm5_plugins.errors import ConfigurationError
    from glm5_plugins.manager import PluginManager

    if arguments.sglang is None and arguments.flashinfer is None:
        raise UsageError("drift needs a version to judge.", "Give --sglang VERSION, --flashinfer VERSION or both.")
    requested, findings = doctor.wanted()
    if wrong := next(iter(findings), None):
        raise ConfigurationError(wrong.what, wrong.mend)
    names = requested or PluginManager.known()
    with tempfile.TemporaryDirectory() as folder:
        scratch, download = Path(folder), arguments.download
        old = drift.installed() if arguments.old is None else drift.surroundings(arguments.old, None, scratch, download)
        new = drift.surroundings(arguments.sglang, arguments.flashinfer, scratch, download)
        found = drift.compare(old, new, names, requested)
    if arguments.json:
        return _print_json(dataclasses.asdict(found) | {"safe": found.safe}, not found.safe)
    for name, version in found.after.items():
        was = found.before.get(name) or ("not installed" if found.before else "")
        print(f"{name} {was + ' -> ' if was else ''}{version}")
    print()
    _print_table(
        ("", "PLUGIN", "NOW", "THEN", "WHY"),
        [("*" if one.requested else "", one.name, one.before or "-", one.after, one.reason) for one in found.changes],
    )
    if requested:
        print("\n* requested in GLM5_PLUGINS")
    if any(one.differences for one in found.changes):
        print("\nDifferent there")
        _print_table((), [("", one.name, text) for one in found.changes for text in one.differences])
    if found.layer:
        print("\nThe layer itself would not be in force")
        _print_table((), [("", text) for text in found.layer])
    print("\n" + ("Safe: " if found.safe else "Not safe: ") + _about_upgrade(found))
    return FINE if found.safe else NOT_IN_FORCE


def _about_upgrade(found: Any) -> str:
    if found.layer:
        return "the layer itself would not be in force."
    if worse := [one.name for one in found.changes if one.worse]:
        return f"{', '.join(worse)} would not be in force."
    return "nothing that is in force now, or requested, is worse off then."


def _report(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from glm5_plugins import merging

    try:
        launches, problems = merging.read(Path(arguments.path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{arguments.path!r} cannot be read: {error}", "Give the value of GLM5_REPORT.") from None
    bad = not launches or not launches[0].healthy
    if arguments.json:
        return _print_json({"launches": [launch.as_json() for launch in launches], "problems": problems}, bad)
    for number, launch in enumerate(launches):
        if number:
            print("\n\nAn earlier launch\n")
        _print_launch(launch)
    if not launches:
        print(f"{arguments.path} holds no report.")
    for problem in problems:
        print(f"\nleft out: {problem}")
    return NOT_IN_FORCE if bad else FINE


def _print_launch(launch: Any) -> None:
    if launch.differences:
        print("Differences")
    for difference in launch.differences:
        _print_table((), [("", difference.name, "", "")])
        _print_table((), [("", "", value, ", ".join(map(str, at))) for value, at in reversed(difference.values)])
    print("Plugins" if not launch.differences else "\nPlugins")
    _print_table(
        ("", "PLUGIN", "TARGET", "VERDICT", "FIRED", "IN", "REASON"),
        [
            (
                "!" if line.differs or line.verdict.bad else "",
                line.plugin,
                line.target,
                line.verdict.value,
                "" if line.fired is None else str(line.fired),
                line.where,
                line.reason,
            )
            for line in launch.lines
        ],
    )
    print("\nProcesses")
    _print_table(
        ("", "PROCESS", "STAGE", "AGREEMENT OF RANKS"),
        [
            ("", str(process), process.stage, ": ".join(filter(None, map(process.agreement.get, ("state", "reason")))))
            for process in launch.processes
        ],
    )


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


def _diagnose(arguments: argparse.Namespace) -> int:
    from glm5_plugins.diagnosis.reading import NotText, diagnose_file, diagnose_stream

    found = []
    for name in arguments.log:
        try:
            if name == "-":
                found.append(diagnose_stream(cast(BufferedReader, sys.stdin.buffer)))
            else:
                found.append(diagnose_file(Path(name)))
        except NotText as error:
            raise UsageError(f"The log {name} {error}.", error.mend) from None
        except (OSError, ValueError) as error:  # ValueError: no file can have such a name
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"The log {name} cannot be read: {reason}.", "Give the path of a file, or - for standard input."
            ) from None
    bad = any(diagnosis.verdict == "unknown" for diagnosis in found)
    if arguments.json:
        rows = [{"log": name, **dataclasses.asdict(d)} for name, d in zip(arguments.log, found, strict=True)]
        return _print_json(rows, bad)
    for number, (name, diagnosis) in enumerate(zip(arguments.log, found, strict=True)):
        if number:
            print()
        if len(found) > 1:
            print(f"== {name}")
        _print_diagnosis(name, diagnosis)
    return NOT_IN_FORCE if bad else FINE


def _print_diagnosis(log: str, diagnosis: Any) -> None:
    print(diagnosis.name)
    place = f"{log}:{diagnosis.line}" if diagnosis.line else ""
    _print_fields(
        [
            ("cause", diagnosis.cause),
            ("cure", diagnosis.cure),
            ("see", diagnosis.link),
            ("where", " ".join(filter(None, [place, diagnosis.process and f"in {diagnosis.process}"]))),
            ("line", diagnosis.evidence),
            ("code", diagnosis.frame),
            ("last stage", diagnosis.stage),
            ("later", ", ".join(diagnosis.later)),
        ]
    )


def _campaign(arguments: argparse.Namespace) -> int:
    from glm5_plugins.campaign import command

    if arguments.example:
        from glm5_plugins.campaign.plan import EXAMPLE

        print(EXAMPLE, end="")
        return FINE
    if arguments.plan is None:
        raise UsageError("A campaign needs a plan.", "`glm5-plugins campaign --example > plan.toml` writes one.")
    out = Path(arguments.out) if arguments.out else None
    try:
        folder = command.run(
            Path(arguments.plan), out, retry_failed=arguments.retry_failed, report_only=arguments.report_only
        )
    except KeyboardInterrupt:
        print("\nglm5-plugins: interrupted; run the same command again to go on.", file=sys.stderr)
        return 128 + signal.SIGINT
    from glm5_plugins.campaign.report import build, load, markdown_of

    report = build(load(folder))
    bad = bool(report.failures)
    if arguments.json:
        return _print_json(dataclasses.asdict(report) | {"folder": folder}, bad)
    for line in report.summary:
        print(line.replace("**", ""))
    print(f"\n{markdown_of(report.decisions)}\n\n{folder / 'report.html'}\n{folder / 'report.md'}")
    return NOT_IN_FORCE if bad else FINE


def _compare(arguments: argparse.Namespace) -> int:
    from glm5_plugins.campaign import command

    command.need_extra("scipy")
    from glm5_plugins.campaign import comparison
    from glm5_plugins.campaign.report import load

    both = comparison.compare(load(Path(arguments.first)), load(Path(arguments.second)))
    if arguments.json:
        return _print_json(dataclasses.asdict(both), False)
    print(comparison.markdown(both, arguments.first, arguments.second), end="")
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
