"""A real SGLang 0.5.11 server on a GPU, with FlashInfer's `fp4_quantize` in every MLP of a tiny Llama.

    python tests/gpu/fp4_server.py --wheels FOLDER --out FOLDER

Installs the wheels into a folder of its own, then starts one server after another:

1. without graphs, raw call: its greedy tokens are what the others are held to;
2. as SGLang comes, raw call: the prefill graph must fail in Dynamo, and with it the launch;
3. the same with `GLM5_PLUGINS=fp4_custom_op`: must serve, with the tokens of 1;
4. with `fp4_graph_break` but without `no_fullgraph`: must be refused at once.

The call cannot change the answer: the kernel of GPUs before SM100 writes no FP4, so what it returns is multiplied by
zero; it stays in the graph all the same. Prints what it saw, writes `fp4_server.json` and the logs to --out, and ends
with 0 if all of it held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS = [[(7 * at + 11 * length) % 256 for at in range(length)] for length in (3, 17, 64, 120, 200)]
KNOWN_ERROR = "Attempted to call function marked as skipped"
DENSE = "sglang.srt.layers.quantization.modelopt_quant:fp4_quantize"
GRAPHS = ("--enforce-piecewise-cuda-graph", "--piecewise-cuda-graph-max-tokens", "256", "--cuda-graph-max-bs", "4")
NO_GRAPHS = ("--disable-piecewise-cuda-graph", "--disable-cuda-graph")
SERVER = (
    *("--load-format", "dummy", "--host", "127.0.0.1", "--mem-fraction-static", "0.2", "--max-total-tokens", "8192"),
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-radix-cache", "--random-seed", "1"),
)

MLP = '''
    """An SGLang plugin for this test: one more FlashInfer call in every MLP of Llama."""

    def register():
        import torch
        from flashinfer import fp4_quantize
        from sglang.srt.models import llama

        made, forward = llama.LlamaMLP.__init__, llama.LlamaMLP.forward
        llama.fp4_quantize = fp4_quantize  # as a from-import at the top of the module would

        def init(self, *args, **kwargs):
            made(self, *args, **kwargs)
            scale = torch.ones(1, dtype=torch.float32, device=next(self.parameters()).device)
            self.register_buffer("fp4_scale", scale, persistent=False)

        def with_fp4(self, x, forward_batch=None, use_reduce_scatter=False):
            packed, _ = llama.fp4_quantize(x, self.fp4_scale)
            x = x + packed[:, :1].to(x.dtype) * 0
            return forward(self, x, forward_batch, use_reduce_scatter)

        llama.LlamaMLP.__init__ = init
        llama.LlamaMLP.forward = with_fp4
'''


@dataclass
class Run:
    """One server and what became of it."""

    name: str
    plugins: str
    served: bool = False
    seconds: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)
    known_error: bool = False
    refusal: str = ""
    fired: dict[str, int] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/glm5-fp4-server"))
    parser.add_argument("--timeout", type=float, default=200, help="seconds for a server to answer")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    environment = prepare(options.wheels, options.work)
    model = write_model(options.work / "model")

    document: dict[str, object] = {"versions": versions(environment)}
    runs: list[Run] = []

    def write() -> None:
        document["runs"] = [asdict(one) for one in runs]
        (options.out / "fp4_server.json").write_text(json.dumps(document, indent=2) + "\n")

    def run(name: str, plugins: str, *flags: str) -> Run:
        runs.append(serve(Run(name, plugins), model, flags, environment, options.out, options.timeout))
        write()
        return runs[-1]

    plain = run("no graphs, raw", "", *NO_GRAPHS)
    raw = run("prefill graph, raw", "", *GRAPHS)
    cured = run("prefill graph, operator", "fp4_custom_op", *GRAPHS)
    alone = run("graph break alone", "fp4_graph_break", *GRAPHS)
    broken = run("graph break", "no_fullgraph,fp4_graph_break", *GRAPHS)
    checks = {
        "the server without graphs serves": plain.served,
        "the prefill graph fails on the raw call with the known error": raw.known_error and not raw.served,
        "with the operator it serves": cured.served,
        "with the same tokens": cured.tokens == plain.tokens != [],
        "the operator ran, says the report": cured.fired.get("flashinfer:fp4_quantize", 0) > 0,
        "and SGLang's own FP4 layers have another kernel's here": cured.verdicts.get(DENSE, "").startswith(
            "not applicable: dense layers hold sglang.jit_kernel"
        ),
        "a graph break without no_fullgraph is refused": "no_fullgraph" in alone.refusal and not alone.served,
        "with no_fullgraph it serves": broken.served,
        "with the same tokens too": broken.tokens == plain.tokens != [],
    }
    document["checks"] = checks
    write()
    print(json.dumps(document["versions"]))
    for what, held in checks.items():
        print("ok  " if held else "FAIL", what)
    return 0 if all(checks.values()) else 1


def prepare(wheels: Path, work: Path) -> dict[str, str]:
    """Install the wheels and the plugin, and return the environment of every server."""
    site, extra = work / "site", work / "extra"
    if not site.exists():
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        files = sorted(str(path) for path in wheels.glob("*.whl"))
        subprocess.run([*install, "--no-cache-dir", "--target", str(site), *files], check=True)
    write_plugin(extra)
    libraries = os.pathsep.join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), str(wheels.resolve())]))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GLM5_", "SGLANG_"))}
    return {
        **inherited,
        "PYTHONPATH": f"{site}{os.pathsep}{extra}",
        "LD_LIBRARY_PATH": libraries,  # libnuma, where the system has none
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
    }


def write_plugin(folder: Path) -> Path:
    """Write the plugin as an installed distribution below `folder`, to be put on PYTHONPATH."""
    info = folder / "fp4_mlp-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fp4-mlp\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nfp4_mlp = fp4_mlp:register\n")
    (folder / "fp4_mlp.py").write_text(textwrap.dedent(MLP))
    return folder


def write_model(folder: Path) -> Path:
    sys.path.insert(0, str(REPOSITORY))
    from tests.support.tiny_model import write_tiny_model

    return write_tiny_model(folder)


def versions(environment: dict[str, str]) -> dict[str, str]:
    code = """
        import json, torch
        from importlib.metadata import version
        names = ("sglang", "flashinfer-python", "sglang-kernel", "torch", "transformers", "triton", "glm5-plugins")
        print(json.dumps({name: version(name) for name in names} | {"gpu": torch.cuda.get_device_name()}))
    """
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {"unknown": done.stderr[-500:]}
    return found


def serve(run: Run, model: Path, flags: tuple[str, ...], environment: dict[str, str], out: Path, timeout: float) -> Run:
    """Start a server, ask it every prompt if it comes up, end it, and read its log and report."""
    slug = run.name.replace(",", "").replace(" ", "-")
    log, reports = out / f"{slug}.log", model.parent / f"reports-{slug}"
    reports.mkdir(exist_ok=True)
    port = free_port()
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    plugins = {"GLM5_PLUGINS": run.plugins, "GLM5_REPORT": str(reports)} if run.plugins else {}
    began = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*argv, *SERVER, *flags],
            env={**environment, **plugins},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            while time.monotonic() - began < timeout and process.poll() is None and not run.served:
                run.served = bool(ask(f"{url}/health_generate"))
                time.sleep(0.5)
            run.seconds = round(time.monotonic() - began, 1)
            if run.served:
                run.tokens = [generate(url, prompt) for prompt in PROMPTS]
        finally:
            end(process)
    text = log.read_text(errors="replace")
    run.known_error = KNOWN_ERROR in text
    found = [line for line in text.splitlines() if line.startswith("glm5-plugins: ")]
    run.refusal = found[0] if found else ""
    for path in sorted(reports.glob("glm5-scheduler-*.json")):
        for row in json.loads(path.read_text())["rows"]:
            run.fired[row["target"]] = row["fired"] or 0
            run.verdicts[row["target"]] = f"{row['summary']}: {row['reason']}"
    print(
        f"{run.name}: {'serves' if run.served else 'does not serve'} after {run.seconds} s; {run.refusal}", flush=True
    )
    if not run.served:
        print(textwrap.indent("\n".join(text.splitlines()[-12:]), "    "), flush=True)
    return run


def ask(url: str, body: dict[str, object] | None = None, timeout: float = 60) -> bytes | None:
    """What the server answers, or None if it does not."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as response:
            answer: bytes = response.read()
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return None
    return answer or b"ok"


def generate(url: str, prompt: list[int]) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    answer = ask(f"{url}/generate", {"input_ids": prompt, "sampling_params": sampling})
    return list(json.loads(answer)["output_ids"]) if answer else []


def end(process: subprocess.Popen[bytes]) -> None:
    """End the server and what is left of its session, which this script began."""
    for number, patience in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def free_port() -> int:
    for port in candidates():
        with contextlib.suppress(OSError), socket.socket() as http:
            http.bind(("127.0.0.1", port))
            return port
    raise SystemExit("no free port between 20000 and 22000")


def candidates() -> Iterator[int]:
    yield from range(20000 + os.getpid() % 1000, 22000)


if __name__ == "__main__":
    sys.exit(main())
