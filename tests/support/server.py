"""Start a real, unmodified SGLang server on a CPU, talk to it, and end it.

What it takes, per SGLang 0.5.9 – 0.5.23 on torch 2.13 without CUDA:

- `SGLANG_USE_CPU_ENGINE=1`, or the rotary embedding looks for vLLM;
- stand-ins for `sgl_kernel` and `torchvision` on PYTHONPATH (`tests/support/standins`);
- a preloaded libcudart up to SGLang 0.5.14, whose FlashInfer asks for one at import. Where the wheel
  nvidia-cuda-runtime is installed it is preloaded; the requirement files say which versions need it.

On SIGTERM 0.5.23 ends with status 0; 0.5.9 kills its own tree, itself included, and may leave some of it
behind. So `stop` ends whatever is left of the processes it saw below the one it started.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tests.support.process_tree import Process, tree, wait_gone

STANDINS = Path(__file__).parent / "standins"
SGLANG = ("-m", "sglang.launch_server")

_GRPC_OFFSET = 10000  # 0.5.12 and later derive a gRPC port, and refuse to start if that is above 65535
_OURS = ("GLM5_", "SGLANG_", "PYTEST_")
CPU_ARGS = (
    *("--load-format", "dummy"),
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--mem-fraction-static", "0.1"),
    *("--max-total-tokens", "2048"),
    "--sleep-on-idle",  # or each scheduler keeps a core busy while it waits
)


class ServerError(RuntimeError):
    """The server ended or stayed silent; the message closes with the last lines of its log."""


class ServerProcess:
    """One server process tree, listening on a free port of 127.0.0.1.

        with ServerProcess(model, log=tmp_path / "server.log") as server:
            print(server.generate("hello"))

    Args:
        model: folder of the model; the weights are made up (`--load-format dummy`).
        log: file that takes everything the server writes.
        python: interpreter of an environment that has SGLang.
        launcher: what Python runs, before the server's own flags.
        args: further server flags.
        env: further environment variables. GLM5_*, SGLANG_* and PYTEST_* of the caller don't get through.
        timeout: seconds until the server must answer.
        progress: called about twice a second while waiting, with the seconds so far.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        python: str | Path = sys.executable,
        launcher: Sequence[str] = SGLANG,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 240,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.log = log
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ready_after: float | None = None
        self._timeout = timeout
        self._progress = progress
        self._argv = [str(python), *launcher, "--model-path", str(model), *CPU_ARGS]
        self._argv += ["--host", "127.0.0.1", "--port", str(self.port), *args]
        self._env = {**_inherited(), **cpu_environment(Path(python)), **(env or {})}
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_file: IO[bytes] | None = None
        self._seen: dict[Process, None] = {}

    def __enter__(self) -> ServerProcess:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_file = self.log.open("wb")
        self._popen = subprocess.Popen(
            self._argv,
            env=self._env,
            cwd=self.log.parent,
            stdin=subprocess.DEVNULL,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must not race with `stop`
        )

    def wait_ready(self) -> float:
        """Wait until /health says yes, and return how many seconds that took.

        Raises:
            ServerError: the process ended first, or time ran out.
        """
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < self._timeout:
            self.processes()
            if (code := self.returncode) is not None:
                raise self._error(f"the server ended with {_exit(code)} after {elapsed:.0f} s")
            if self._healthy():
                self.ready_after = time.monotonic() - began
                return self.ready_after
            if self._progress:
                self._progress(elapsed)
            time.sleep(0.5)
        raise self._error(f"the server didn't answer within {self._timeout:.0f} s")

    @property
    def returncode(self) -> int | None:
        """How the first process ended, or None while it runs."""
        return self._popen.poll() if self._popen else None

    def processes(self) -> list[Process]:
        """The live processes of the server, parents first."""
        if self._popen is None or self._popen.poll() is not None:
            return [process for process in self._seen if process.alive]
        found = [process for process in tree(self._popen.pid) if process.alive]
        self._seen.update(dict.fromkeys(found))
        return found

    def cpu_seconds(self) -> float:
        """The processor time that the live processes of the server have used."""
        return sum(process.cpu_seconds for process in self.processes())

    def generate(self, prompt: str, *, max_new_tokens: int = 8, timeout: float = 60) -> dict[str, Any]:
        """Ask /generate for a greedy continuation and return its JSON (`text`, `output_ids`, `meta_info`).

        `meta_info` has the log-probability of each new token: weights that are made up give the same few tokens
        whatever the layers do, the numbers behind them tell more.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
        body = json.dumps({"text": prompt, "sampling_params": sampling, "return_logprob": True}).encode()
        answer: dict[str, Any] = json.loads(self._open("/generate", timeout, body))
        return answer

    def get_json(self, path: str, *, timeout: float = 30) -> Any:
        """GET a path of the server, such as `/server_info`, as JSON."""
        return json.loads(self._open(path, timeout))

    def log_text(self) -> str:
        """Everything the server has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def stop(self, *, grace: float = 15) -> None:
        """Ask the server to end, then end what is left of the processes seen below it."""
        if self._popen is None:
            return
        self.processes()
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace)
        # What outlives the first process ends within a moment (multiprocessing's resource tracker) or never.
        for process in wait_gone(list(self._seen), 2):
            process.signal(signal.SIGKILL)
        self._popen.wait(10)
        wait_gone(list(self._seen), 10)
        if self._log_file:
            self._log_file.close()

    def _healthy(self) -> bool:
        try:
            self._open("/health", timeout=5)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False
        return True

    def _open(self, path: str, timeout: float, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=timeout) as response:
            answer: bytes = response.read()
        return answer

    def _error(self, what: str) -> ServerError:
        return ServerError(f"{what}\n  command: {' '.join(self._argv)}\n  log: {self.log}\n{self.log_tail()}")


def _exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _free_port() -> int:
    """A port that is free together with its gRPC port; both below what the kernel hands out to clients.

    SGLang listens on it up to a minute later. Until this process ends, no other test run of the same network gets it.
    """
    while True:
        port = random.randrange(20000, 22000)
        with (
            suppress(OSError),
            socket.socket() as http,
            socket.socket() as grpc,
            socket.socket(socket.AF_UNIX) as claim,
        ):
            http.bind(("127.0.0.1", port))
            grpc.bind(("127.0.0.1", port + _GRPC_OFFSET))
            claim.bind(f"\0glm5-plugins tests, port {port}")  # a name in no file system, of which nothing is left
            claim.detach()  # nobody closes it
            return port


def _inherited() -> dict[str, str]:
    """The caller's environment without what would steer the server or its Python."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD")
    return {k: v for k, v in os.environ.items() if not k.startswith(_OURS) and k not in dropped}


def cpu_environment(python: Path) -> dict[str, str]:
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": str(STANDINS),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1",  # SGLang warms itself up over HTTP
        "no_proxy": "127.0.0.1",
    }
    # Not resolved: the python of a virtual environment is a link out of it.
    runtimes = python.absolute().parent.parent.glob("lib/python3*/site-packages/nvidia/cu*/lib/libcudart.so.*")
    if runtime := next(runtimes, None):
        environment["LD_PRELOAD"] = str(runtime)
    return environment
