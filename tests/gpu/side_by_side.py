"""On a real GPU: servers side by side, so that what is timed are pairs; one run of a few minutes.

    python -m tests.gpu.side_by_side --out FOLDER --work FOLDER [--limit 280] [--rounds 60]
    python -m tests.gpu.side_by_side … --ranks 2 --modes none,breakable --experts 8

The model, the raw FP4 call in every MLP and the questions are those of `prefill_server`. At once are started:

- two servers with an empty FlashInfer cache each and no prefill graph, one with `fp4_warmup` and one without: the FP4
  module is built before capture, or in the middle of it. When both are up they are ended, and the same two are
  started again on the caches that they filled;
- the servers of --modes for the prefill graph: none, breakable, compiled with breaks, compiled without. They answer the
  same questions, and when the others are gone they are asked in turn for one token to a prompt that none has seen, one
  request at a time;
- with --experts, two servers of a mixture of experts, with the plugin `ep` and without: how many experts each rank
  holds, and what both answer.

What is found goes to `results.jsonl` in --out as it comes; logs and reports of every server lie below --work. Ends by
itself after --limit seconds, and with 1 if a server did not come up or answered differently.

Needs what `prefill_server` needs, from SGLang 0.5.14 on.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import re
import shlex
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.gpu.prefill_server import (
    MODES,
    SIZES,
    GpuServer,
    add_modes,
    differences,
    find_versions,
    first_off,
    no_prefill_graph,
    prompt,
    question,
    write_model,
    write_plugins,
)
from tests.support.server import ServerError

ROUNDS_IN_A_PLACE = 5

Answer = TypeVar("Answer")

# What several ranks on one host are started with: nothing that uses NVLink multicast.
RANKS_ARGS = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")

TIMING_S = 45.0
"""Seconds that are kept for timing prefill, whatever else is not done by then."""

STARTS: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {
    "lazy": ((), {}),
    "fp4_warmup": (("fp4_warmup",), {"GLM5_FP4_WARMUP_MODULES": "fp4_quantization"}),
}

# What a server that did not come up is started with once more, to have its figures all the same.
SECOND_TRY = {"GLM5_ON_ERROR": "warn", "GLM5_NO_FULLGRAPH_CHECK": "0"}

EXPERTS: dict[str, Sequence[str]] = {"experts-without-ep": (), "experts-with-ep": ("ep",)}

HELD_EXPERTS = '''
    """Writes down the shape of the first layer of experts that a rank holds."""
    import json
    import os

    from glm5_plugins import hookimpl

    @hookimpl(wrapper=True)
    def glm5_model_load(model_runner):
        result = yield
        shapes = (value.shape for name, value in model_runner.model.named_parameters() if "w13_weight" in name)
        if (shape := next(shapes, None)) is not None:
            rank = model_runner.tp_rank
            with open(f"{os.environ['FIELD_FORWARDS']}.rank{rank}", "w") as file:
                json.dump({"rank": rank, "experts": shape[0], "rows": shape[1]}, file)
        return result
'''

FORWARD_TIMES = '''
    """Writes down each prefill in the scheduler: tokens, milliseconds, whether the prefill graph ran it."""
    import json
    import os
    import time

    import torch
    from glm5_plugins import hookimpl

    @hookimpl(wrapper=True)
    def glm5_model_load(model_runner):
        result = yield
        if torch.cuda.is_available():
            model_runner.forward = Forward(model_runner.forward, os.environ["FIELD_FORWARDS"])
        return result

    class Forward:
        def __init__(self, forward, path):
            self.forward, self.file, self.pending = forward, open(path, "a", buffering=1), []

        def __call__(self, batch, *args, **kwargs):
            if not batch.forward_mode.is_extend():
                return self.forward(batch, *args, **kwargs)
            tokens = int(batch.input_ids.shape[0])
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            before = time.perf_counter()
            output = self.forward(batch, *args, **kwargs)
            host_ms = (time.perf_counter() - before) * 1e3
            ended.record()
            # Nothing waits here for the GPU: a time is read when a later prefill finds it there.
            while self.pending and self.pending[0][2].query():
                row, one, other = self.pending.pop(0)
                self.file.write(json.dumps(row | {"ms": one.elapsed_time(other)}) + "\\n")
            row = {"tokens": tokens, "host_ms": host_ms, "graph": bool(output.can_run_graph)}
            self.pending.append((row, began, ended))
            return output
'''


@dataclass
class Run:
    """What all parts of one run share.

    Args:
        out: Where results go.
        work: Where servers have their logs, reports and caches.
        limit: Seconds after which the run ends.
        kernels: A folder of kernels that SGLang would otherwise compile when first called; each server gets a copy.
        server_args: Further arguments of every server.
        server_env: Further variables of every server.
    """

    out: Path
    work: Path
    limit: float
    kernels: Path | None
    server_args: Sequence[str]
    server_env: Mapping[str, str]
    began: float = field(default_factory=time.monotonic)
    model: Path = field(init=False)
    site: Path = field(init=False)
    experts: Path | None = None
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _live: list[GpuServer] = field(default_factory=list)
    _closed: bool = False

    def __post_init__(self) -> None:
        for folder in (self.out, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        self.model = write_model(self.work / "model")
        self.site = write_plugins(self.work / "site", forward_times=FORWARD_TIMES, held_experts=HELD_EXPERTS)

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began

    def say(self, what: str, **values: Any) -> None:
        """Add a line to the results, and print its beginning."""
        line = json.dumps({"at": round(self.now, 2), "what": what, **values})
        with self._writing:
            with (self.out / "results.jsonl").open("a") as file:
                file.write(line + "\n")
            print(line[:400], flush=True)

    def server(
        self,
        name: str,
        plugins: Sequence[str],
        variables: Mapping[str, str],
        *,
        until: float,
        caches: str,
        graph: bool,
        model: Path | None = None,
    ) -> GpuServer:
        """A server that is not started yet.

        Args:
            name: Its folder below `work`.
            plugins: Besides those that are in every server here.
            variables: Further ones.
            until: When it must be ready, in seconds of the run.
            caches: The folder of its caches below `work`; servers that share it share what they compile.
            graph: Whether it makes a prefill graph.
            model: The folder of another model than the run's.
        """
        model = model or self.model
        folder, cache = self.work / name, self.work / caches
        (folder / "reports").mkdir(parents=True)
        env = {
            "PYTHONPATH": os.pathsep.join([str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "GLM5_PLUGINS": ",".join([*plugins, "raw_fp4", "forward_times", "held_experts"]),
            "GLM5_REPORT": str(folder / "reports"),
            "FIELD_FORWARDS": str(folder / "forwards.jsonl"),
            "FLASHINFER_WORKSPACE_BASE": str(cache),
            "TVM_FFI_CACHE_DIR": str(cache / "tvm-ffi"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "XDG_CACHE_HOME": str(cache / "xdg"),
            "HF_HUB_OFFLINE": "1",
            **self.server_env,
            **variables,
        }
        args = [*([] if graph else no_prefill_graph()), "--mem-fraction-static", "0.5", "--max-total-tokens", "131072"]
        args += ["--max-running-requests", "16", *self.server_args]
        server = GpuServer(model, folder, args, env, timeout=max(1.0, until - self.now))
        with self._writing:
            if self._closed:
                raise ServerError("time is up")
            if not cache.exists():
                cache.mkdir()
                if self.kernels is not None:
                    shutil.copytree(self.kernels, cache / "tvm-ffi")
            while any(server.port == other.port for other in self._live):
                server = GpuServer(model, folder, args, env, timeout=max(1.0, until - self.now))
            self._live.append(server)
        return server

    def end_all_but(self, *kept: GpuServer) -> None:
        """End every other server that still runs; none is made from now on."""
        with self._writing:
            self._closed = True
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.stop(grace=5), [one for one in self._live if one not in kept]))


@contextmanager
def ready(run: Run, server: GpuServer, name: str) -> Iterator[GpuServer]:
    """Start a server and say how long it took to be ready; it is ended if it is not, or at an error."""
    began = run.now
    try:
        server.start()
        server.wait_ready()
        run.say("ready", server=name, started_at=began, seconds=server.ready_after)
        yield server
    except BaseException as error:
        run.say("failed", server=name, started_at=began, error=str(error)[-6000:])
        server.stop(grace=5)
        raise


def start_and_ask(
    run: Run,
    name: str,
    plugins: Sequence[str],
    variables: Mapping[str, str],
    ask: Callable[[GpuServer], Answer],
    *,
    until: float,
    caches: str,
    model: Path | None = None,
) -> tuple[GpuServer, Answer] | None:
    """Start a server without a prefill graph, ask it, and end it; None if it does not come up."""
    try:
        server = run.server(name, plugins, variables, until=until, caches=caches, graph=False, model=model)
        with ready(run, server, name):
            answer = ask(server)
    except (ServerError, OSError):
        return None
    server.stop(grace=5)
    return server, answer


def one_token(server: GpuServer) -> list[int]:
    """The answer to one prompt: the tokens."""
    tokens: list[int] = server.ask([prompt(64, 0)])[0]["tokens"]
    return tokens


# --- the start, with and without fp4_warmup ------------------------------------------------------------------


def starts(run: Run, until: float) -> bool:
    """Both servers on empty caches, then both on what they filled; returns whether all came up."""
    for caches in ("cold", "warm"):
        with ThreadPoolExecutor() as pool:
            ups = [pool.submit(start_once, run, way, caches, until) for way in STARTS]
        if not all(up.result() for up in ups):
            return False
    return True


def start_once(run: Run, way: str, caches: str, until: float) -> bool:
    """Start one of the two servers, ask it for a token, end it, and say what its log and report say."""
    name = f"{caches}-{way}"
    plugins, variables = STARTS[way]
    asked = start_and_ask(run, name, plugins, variables, one_token, until=until, caches=f"caches-{way}")
    if asked is None:
        return False
    server, tokens = asked
    run.say("start", server=name, seconds=server.ready_after, tokens=tokens, **log_times(server), said=rows(server))
    return True


def log_times(server: GpuServer) -> dict[str, Any]:
    """What SGLang's log says about capture, and the plugin about what came before it."""
    text = server.log_text()
    captures = re.findall(r"Capture (.*?) CUDA graph end\. elapsed=([\d.]+) s", text)
    return {
        "capture_s": {what: float(seconds) for what, seconds in captures},
        "warmup": re.findall(r"fp4_warmup: .*(ready before capture.*)", text)[:1],
    }


def rows(server: GpuServer) -> list[str]:
    """The rows of the layer's reports about the plugins under test."""
    reports = [json.loads(file.read_text()) for file in (server.log.parent / "reports").glob("*.json")]
    return [
        f"{report['process']['role']} {report['process']['pid']}: {row['plugin']}: {row['summary']}: "
        f"{row['target']}: {row['reason']}"
        for report in reports
        for row in report["rows"]
        if row["plugin"] in ("piecewise", "no_fullgraph", "fp4_warmup", "fp4_custom_op", "raw_fp4", "ep")
    ]


# --- a mixture of experts, with and without ep ---------------------------------------------------------------


def mixture(run: Run, name: str, until: float) -> bool:
    """Start one of the two servers, ask it everything, end it, and say which experts each rank held."""

    def everything(server: GpuServer) -> list[dict[str, Any]]:
        return list(itertools.takewhile(lambda _: run.now < until, question(server)))

    caches = f"caches-{name}"
    asked = start_and_ask(run, name, EXPERTS[name], {}, everything, until=until, caches=caches, model=run.experts)
    if asked is None:
        return False
    server, answers = asked
    held = [json.loads(file.read_text()) for file in sorted(server.log.parent.glob("forwards.jsonl.rank*"))]
    ranks = sorted(set(re.findall(r" (TP\d+(?: EP\d+)?)\]", server.log_text())))
    run.say("experts", server=name, held=held, said=rows(server), ranks=ranks, answers=answers)
    return True


# --- the prefill graph ---------------------------------------------------------------------------------------


def bring_up(run: Run, mode: str, until: float) -> GpuServer | None:
    """Start a server for one kind of prefill graph and ask it everything; a second time if it does not come up."""
    plugins, variables = MODES[mode]
    if "piecewise" in plugins:
        variables = {**variables, "GLM5_PIECEWISE_TOKENS": ",".join(map(str, SIZES))}
    for name, further in ((mode, {}), (f"{mode}-second", SECOND_TRY)):
        with suppress(Exception):  # it is said by then; the other servers go on
            server = run.server(
                name,
                plugins,
                {**variables, **further},
                until=until,
                caches="caches-prefill",
                graph="piecewise" in plugins,
            )
            with ready(run, server, name):
                run.say("report", server=name, **log_times(server), said=rows(server))
                answers = list(itertools.takewhile(lambda _: run.now < until, question(server)))
                run.say("answers", server=name, mode=mode, answers=answers)
                return server
        if run.now > until - 60:
            break
    return None


class Client:
    """One connection to a server, kept open."""

    def __init__(self, server: GpuServer) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)

    def prefill_ms(self, tokens: Sequence[int]) -> tuple[float, float]:
        """Milliseconds to the one token that is asked for: here, and by the server's own account."""
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        body = json.dumps({"input_ids": list(tokens), "sampling_params": sampling}).encode()
        began = time.perf_counter()
        self._connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse().read()
        took = (time.perf_counter() - began) * 1e3
        return took, json.loads(answer)["meta_info"]["e2e_latency"] * 1e3


def take_turns(run: Run, servers: Mapping[str, GpuServer], rounds: int, until: float) -> None:
    """Ask the servers in turn, every round beginning with another one, each round with prompts of its own.

    Each server has processors of its own, and every few rounds they change places: a server that happens to run on a
    slower processor, for good, was seen to take 1.8 times as long as another that does the same.
    """
    clients = {mode: Client(server) for mode, server in servers.items()}
    for server in servers.values():
        server.flush()
    for number in range(5):
        for size in SIZES:
            for client in clients.values():
                client.prefill_ms(prompt(size, 10_000 + number))
    modes = list(clients)
    _one_more(clients)
    before = {mode: len(forwards(server)) for mode, server in servers.items()}
    for number in range(rounds):
        if run.now > until:
            break
        if number % ROUNDS_IN_A_PLACE == 0:
            place(list(servers.values()), number // ROUNDS_IN_A_PLACE)
            for client, again in itertools.product(clients.values(), range(3)):
                client.prefill_ms(prompt(200, 40_000 + number + again))
        for size in SIZES:
            order = modes[number % len(modes) :] + modes[: number % len(modes)]
            took = {mode: clients[mode].prefill_ms(prompt(size, 20_000 + number)) for mode in order}
            run.say("round", number=number, size=size, ms={mode: took[mode] for mode in modes})
    _one_more(clients)
    for mode, server in servers.items():
        run.say("forwards", mode=mode, rows=list(of_sizes(forwards(server)[before[mode] :])))


def place(servers: Sequence[GpuServer], turn: int) -> None:
    """Give each server its share of the processors; with the next turn, the next server has it."""
    processors = sorted(os.sched_getaffinity(0))
    share = len(processors) // len(servers)
    for at, server in enumerate(servers):
        first = (at + turn) % len(servers) * share
        for process in server.processes():
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                with suppress(OSError):  # it has ended meanwhile
                    os.sched_setaffinity(int(thread.name), processors[first : first + share])


def _one_more(clients: Mapping[str, Client]) -> None:
    """A prefill of no size that is timed, at which the time of the last one is written down."""
    for client in clients.values():
        client.prefill_ms(prompt(2, 30_000))


def forwards(server: GpuServer) -> list[dict[str, Any]]:
    """The prefills that a server has written down."""
    file = server.log.parent / "forwards.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def of_sizes(found: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The prefills of the sizes that are timed; a prompt may begin with a token or two of another one, still cached."""
    for row in found:
        for size in SIZES:
            if size - 4 < row["tokens"] <= size:
                yield {**row, "size": size}


# --- what was found ------------------------------------------------------------------------------------------


def against_itself(answers: list[dict[str, Any]]) -> str:
    """How the second half of a server's answers, after the flush, differs from the same questions before it."""
    half = len(answers) // 2
    wrong, off = differences(answers[:half], answers[half:])
    return f"{len(wrong)} of {half}, {off:.3g}" if len(answers) == 2 * half and half else ""


def median_of_ratios(ratios: Sequence[float], resamples: int = 4000) -> tuple[float, float, float]:
    """The median, and a 95 % interval by the bootstrap over rounds."""
    numbers = random.Random(0)
    medians = sorted(statistics.median(numbers.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return statistics.median(ratios), medians[resamples // 40], medians[-resamples // 40]


def tables(results: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """The tables in Markdown, and whether all came up and answered as the server without a prefill graph."""
    lines = ["| server | ready, s | capture, s | warm-up |", "|---|---|---|---|"]
    lines += [
        f"| {row['server']} | {row['seconds']:.1f} | {row['capture_s']} | {' '.join(row['warmup'])[:200]} |"
        for row in results
        if row["what"] == "start"
    ]
    answers = {row["mode"]: row["answers"] for row in results if row["what"] == "answers"}
    asked = {mode: len(found) for mode, found in answers.items()}
    wanted = results[0]["modes"]
    right = set(answers) == set(wanted) and not any(row["what"] == "failed" for row in results)
    right = right and len(set(asked.values())) == 1
    lines += [
        "",
        "| prefill graph | other tokens | of captured sizes | log-probabilities off by up to | of the first token | "
        "against itself after the flush |",
        "|---|---|---|---|---|---|",
    ]
    for mode in answers if "none" in answers else ():
        both = min(asked["none"], asked[mode])  # fewer than all only where time was up
        reference, ours = answers["none"][:both], answers[mode][:both]
        wrong, off = differences(reference, ours)
        captured = [what for what in wrong if not what.startswith("odd")]
        lines.append(
            f"| {mode} | {len(wrong)} of {both} | {len(captured)} | {off:.3g} | {first_off(reference, ours):.3g} | "
            f"{against_itself(ours)} |"
        )
        # With several ranks SGLang's later tokens may differ from run to run; the first, which is prefill's, may not.
        right = right and (not captured if results[0]["ranks"] == 1 else not first_off(reference, ours))
    mixtures = {row["server"]: row for row in results if row["what"] == "experts"}
    if len(mixtures) == 2:
        without, having = (mixtures[name] for name in EXPERTS)
        wrong, off = differences(without["answers"], having["answers"])
        lines += ["", f"Experts held: {without['held']} without ep, {having['held']} with it."]
        lines += [
            f"{len(wrong)} of {len(having['answers'])} answers differ, log-probabilities by up to {off:.3g}, "
            f"of the first token {first_off(without['answers'], having['answers']):.3g}; against itself: without "
            f"{against_itself(without['answers'])}, with {against_itself(having['answers'])}."
        ]
    rounds = [row for row in results if row["what"] == "round"]
    inside = {row["mode"]: row["rows"] for row in results if row["what"] == "forwards"}
    for which, title in enumerate(("as a client sees it", "by the server's account", "the forward pass alone")):
        lines += [
            "",
            f"| {title} | tokens | rounds | median ms | ratio to none | 95 % | graph |",
            "|---|---|---|---|---|---|---|",
        ]
        for mode in rounds[0]["ms"] if rounds else ():
            for size in SIZES:
                if which < 2:
                    ours = [row["ms"][mode][which] for row in rounds if row["size"] == size]
                    base = [row["ms"]["none"][which] for row in rounds if row["size"] == size]
                else:
                    ours = [row["ms"] for row in inside.get(mode, ()) if row["size"] == size]
                    base = [row["ms"] for row in inside.get("none", ()) if row["size"] == size]
                if not ours or len(ours) != len(base):
                    continue
                ratio, low, high = median_of_ratios([one / other for one, other in zip(ours, base, strict=True)])
                graph = {row["graph"] for row in inside.get(mode, ()) if row["size"] == size}
                lines.append(
                    f"| {mode} | {size} | {len(ours)} | {statistics.median(ours):.2f} | {ratio:.3f} | "
                    f"{low:.3f}-{high:.3f} | {graph or ''} |"
                )
    return "\n".join(lines), right


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="folder for the model, caches, logs and reports")
    parser.add_argument("--limit", type=float, default=280, help="seconds after which the run ends")
    parser.add_argument("--rounds", type=int, default=60, help="rounds to time, if they fit")
    parser.add_argument(
        "--kernels", type=Path, help="folder of kernels that SGLang has compiled before, for each server"
    )
    add_modes(parser)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of each server")
    parser.add_argument("--experts", type=int, default=0, help="experts of the two servers with and without ep")
    parser.add_argument("--no-starts", action="store_true", help="leave out the pairs with and without fp4_warmup")
    parser.add_argument("--server-args", type=shlex.split, default=[], help="for every server; a CPU in a rehearsal")
    parser.add_argument("--server-env", action="append", default=[], metavar="NAME=VALUE", help="for every server")
    options = parser.parse_args()
    modes: list[str] = options.modes
    variables = dict(one.split("=", 1) for one in options.server_env)
    arguments = [*options.server_args]
    if options.ranks > 1:
        arguments += ["--tp-size", str(options.ranks), *RANKS_ARGS]
    run = Run(options.out, options.work, options.limit, options.kernels, arguments, variables)
    run.experts = write_model(run.work / "experts", options.experts) if options.experts else None
    run.say("begin", versions=find_versions(), modes=modes, ranks=options.ranks)
    until = run.limit - TIMING_S - 15
    pool = ThreadPoolExecutor()
    try:
        pairs = None if options.no_starts else pool.submit(starts, run, until)
        ups: dict[str, Future[GpuServer | None]] = {mode: pool.submit(bring_up, run, mode, until) for mode in modes}
        mixtures = [pool.submit(mixture, run, name, until) for name in EXPERTS] if options.experts else []
        everything: list[Future[Any]] = [*ups.values(), *([pairs] if pairs else []), *mixtures]
        wait(everything, timeout=run.limit - TIMING_S - run.now)
        run.say("to be timed", done={mode: up.done() for mode, up in ups.items()}, pairs=pairs is None or pairs.done())
        servers = {mode: up.result() for mode, up in ups.items() if up.done()}
        found = {mode: server for mode, server in servers.items() if server is not None}
        run.end_all_but(*found.values())
        if "none" in found and len(found) > 1:
            take_turns(run, found, options.rounds, run.limit - 12)
    except Exception as error:  # the tables show what there is
        run.say("failed", server="timing", error=f"{type(error).__name__}: {error}")
    finally:
        run.end_all_but()
        pool.shutdown(wait=False, cancel_futures=True)
    results = [json.loads(line) for line in (run.out / "results.jsonl").read_text().splitlines()]
    table, right = tables(results)
    (run.out / "tables.md").write_text(table + "\n")
    print(table, flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
