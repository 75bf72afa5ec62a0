"""A made-up `sglang` that serves and benchmarks in a moment, for tests of what happens around real ones.

The server answers /health, has a child process, and does as its arguments say: `--die`, `--silent`, `--speed N`,
`--die-in-run`, `--stubborn` (ignores SIGTERM, and so does its child). The benchmark asks it for its speed.
"""

from __future__ import annotations

from pathlib import Path

_SERVER = """
import argparse, http.server, json, os, pathlib, signal, socketserver, subprocess, sys, time

parser = argparse.ArgumentParser(prog="launch_server.py")
parser.add_argument("--model-path")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--speed", type=float, default=100.0)
for flag in ("--die", "--silent", "--die-in-run", "--stubborn"):
    parser.add_argument(flag, action="store_true")
args = parser.parse_args()
ours = sorted(name for name in os.environ if name.startswith("GLM5_"))
print("[2026-01-01 00:00:00] server_args=", vars(args), ours, flush=True)
if args.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(os.environ["PIDS"]).open("a").write(f"{os.getpid()} {child.pid}\\n")
if args.die:
    child.kill()
    raise ModuleNotFoundError("No module named 'vllm'")
if args.silent:
    time.sleep(600)
if os.environ.get("GLM5_PLUGINS") and "GLM5_NO_WAY_IN" not in os.environ:
    rows = [
        {"plugin": name, "target": "a:b", "verdict": os.environ.get("GLM5_VERDICT", "applied"), "fired": 1}
        for name in os.environ["GLM5_PLUGINS"].split(",")
    ]
    pathlib.Path(os.environ["GLM5_REPORT"], "glm5-main-1.json").write_text(json.dumps({"rows": rows}))


class Server(socketserver.TCPServer):  # HTTPServer asks the network for the name of this machine
    allow_reuse_address = True


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/speed" and args.die_in_run:
            child.kill()
            os._exit(3)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(args.speed).encode())

    def log_message(self, *ignored):
        pass


def leave(*ignored):
    child.kill()
    os._exit(0)


if not args.stubborn:
    signal.signal(signal.SIGTERM, leave)
Server((args.host, args.port), Handler).serve_forever()
"""

_BENCH = """
import argparse, json, os, random, sys, time, urllib.request

parser = argparse.ArgumentParser()
for flag in ("--port", "--num-prompts", "--random-input-len", "--random-output-len", "--max-concurrency", "--seed"):
    parser.add_argument(flag, type=int)
parser.add_argument("--output-file")
args, _ = parser.parse_known_args()
assert not any(name.startswith("GLM5_") for name in os.environ)
time.sleep(float(os.environ.get("BENCH_SECONDS", "0")))
speed = float(urllib.request.urlopen(f"http://127.0.0.1:{args.port}/speed").read())
speed *= args.max_concurrency * random.Random(args.seed).gauss(1, 0.002)
completed = args.num_prompts - int(os.environ.get("BENCH_DROPS", "0"))
result = {
    "completed": completed,
    "output_throughput": speed,
    "median_ttft_ms": 1000 / speed,
    "median_itl_ms": 500 / speed,
    "total_output_tokens": completed * args.random_output_len,
    "server_info": {"api_key": "hush-hush"},
}
with open(args.output_file, "a") as file:
    print(json.dumps(result), file=file)
"""


def write(folder: Path, version: str = "0.5.23") -> Path:
    """Write the package into `folder`, which has to be put on PYTHONPATH, and return it."""
    package = folder / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(_SERVER, encoding="utf-8")
    (package / "bench_serving.py").write_text(_BENCH, encoding="utf-8")
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n", encoding="utf-8")
    return folder
