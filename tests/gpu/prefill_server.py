"""On a real GPU: prefill graphs of a model with a break in every layer, against the server without a prefill graph.

    python -m tests.gpu.prefill_server --out FOLDER [--modes none,breakable,compile,fp4_custom_op]

A 16-layer Llama with made-up weights calls FlashInfer's raw `fp4_quantize` in its MLP; what it returns is read and
does not change the numbers. One server after another is started, all on the same model: without a prefill graph, with
the breakable one, compiled with breaks, and, where that plugin is there, with the breaks taken away by `fp4_custom_op`.
Each gets the same requests in the same order: every size repeated, sizes mixed in one batch, interleaved, odd sizes
that are padded, and all again after the cache is flushed. Tokens must equal those without a prefill graph; then prefill
is timed. Prints two Markdown tables; FOLDER gets `prefill.json`, the servers' logs and the layer's reports. Exits with
1 if a server did not come up or answered differently.

Needs SGLang 0.5.11 or later (the layer comes in by its entry point), a GPU, nvcc, and this package installed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import textwrap
import time
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.support.server import SGLANG, ServerError, ServerProcess
from tests.support.tiny_model import write_tiny_model

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 16, 1024, 2816, 16, 8
SIZES = (64, 256, 1024)
NEW_TOKENS = 8

SERVER_ARGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "65536", "--cuda-graph-max-bs", "4"),
    *("--chunked-prefill-size", "4096", "--random-seed", "1"),
)

# What each kind of server is started with: plugins besides raw_fp4, variables, and flags by version.
MODES: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {
    "none": ((), {}),
    "none_again": ((), {}),  # tells how far apart two of the same are
    "breakable": (
        ("piecewise", "no_fullgraph"),
        {"GLM5_PIECEWISE_BACKEND": "breakable", "GLM5_NO_FULLGRAPH_MODE": "breakable"},
    ),
    "compile": (
        ("piecewise", "no_fullgraph"),
        {"GLM5_PIECEWISE_BACKEND": "tc_piecewise", "GLM5_NO_FULLGRAPH_MODE": "compile"},
    ),
    "fp4_custom_op": (
        ("piecewise", "no_fullgraph", "fp4_custom_op"),
        {"GLM5_PIECEWISE_BACKEND": "tc_piecewise", "GLM5_NO_FULLGRAPH_MODE": "compile"},
    ),
}

RAW_FP4 = '''
    """Puts FlashInfer's fp4_quantize into the MLP of Llama: read, and without effect on the numbers."""
    import flashinfer
    import torch
    from glm5_plugins import Patch, hookimpl

    SCALE = []

    def with_fp4(forward):
        def mlp(self, x, *args, **kwargs):
            packed, _ = flashinfer.fp4_quantize(x, SCALE[0])
            # What was packed may be anything on this GPU; times zero it is zero.
            return forward(self, x + packed[:, :1].to(x.dtype) * 0, *args, **kwargs)
        return mlp

    @hookimpl
    def glm5_patches():
        yield Patch("sglang.srt.models.llama:LlamaMLP.forward", with_fp4, "a graph break in every layer")

    @hookimpl(wrapper=True)
    def glm5_model_load(model_runner):
        SCALE.append(torch.ones(1, dtype=torch.float32, device=f"cuda:{model_runner.gpu_id}"))
        return (yield)
'''


class GpuServer(ServerProcess):
    """A server on the GPU, in this process's environment."""

    def __init__(
        self, model: Path, folder: Path, args: Sequence[str], env: Mapping[str, str], timeout: float = 420
    ) -> None:
        super().__init__(model, folder / "server.log", timeout=timeout, progress=None)
        self._argv = [sys.executable, *SGLANG, "--model-path", str(model), *SERVER_ARGS]
        self._argv += ["--host", "127.0.0.1", "--port", str(self.port), *args]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GLM5_", "SGLANG_"))}
        self._env = {**inherited, "PYTHONUNBUFFERED": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **env}

    def ask(self, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[dict[str, Any]]:
        """Greedy continuations of a batch of prompts: tokens and their log-probabilities."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": sampling, "return_logprob": True}
        answers = json.loads(self._open("/generate", 120, json.dumps(body).encode()))
        return [
            {
                "tokens": [token for _, token, *_ in answer["meta_info"]["output_token_logprobs"]],
                "logprobs": [value for value, *_ in answer["meta_info"]["output_token_logprobs"]],
            }
            for answer in answers
        ]

    def flush(self) -> None:
        """Forget every cached prefix; SGLang refuses as long as a request is not quite over."""
        for _ in range(50):
            with suppress(urllib.error.HTTPError):
                self._open("/flush_cache", 30, b"")
                return
            time.sleep(0.2)
        raise ServerError("the cache was not flushed within 10 s")

    def prefill_ms(self, prompt: Sequence[int]) -> float:
        """How long the first token of a new prompt takes, over HTTP."""
        began = time.perf_counter()
        self.ask([prompt], new_tokens=1)
        return (time.perf_counter() - began) * 1e3


def write_model(folder: Path, experts: int = 0) -> Path:
    """A Llama whose weights are random and large enough that the most likely tokens stand out; with experts, a GLM-4.5.

    Each expert is a quarter as wide as the MLP of the Llama; two of them see a token, beside the one that they share.
    """
    import torch
    from safetensors.torch import save_file

    write_tiny_model(folder, "glm4_moe" if experts else "llama")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config |= {
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 8192,
    }
    narrow_mlp = INTERMEDIATE // 4
    if experts:
        config |= {"n_routed_experts": experts, "moe_intermediate_size": narrow_mlp}
    file.write_text(json.dumps(config))
    torch.manual_seed(0)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        return (torch.randn(rows, columns) * gain / math.sqrt(columns)).to(torch.bfloat16)

    narrow = KV_HEADS * HIDDEN // HEADS
    weights = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], HIDDEN).to(torch.bfloat16),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": matrix(config["vocab_size"], HIDDEN, 4),
    }
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        mlps = {"mlp": INTERMEDIATE}
        if experts and number >= config["first_k_dense_replace"]:
            mlps = {f"mlp.experts.{expert}": narrow_mlp for expert in range(experts)} | {
                "mlp.shared_experts": narrow_mlp
            }
            weights[f"{layer}.mlp.gate.weight"] = matrix(experts, HIDDEN)
            weights[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
        for name, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", narrow, HIDDEN),
            ("self_attn.v_proj", narrow, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            *((f"{mlp}.{name}", width, HIDDEN) for mlp, width in mlps.items() for name in ("gate_proj", "up_proj")),
            *((f"{mlp}.down_proj", HIDDEN, width) for mlp, width in mlps.items()),
        ):
            weights[f"{layer}.{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def write_plugins(folder: Path, **others: str) -> Path:
    """The distribution with `raw_fp4`, and with other plugins by name and source, as a folder for PYTHONPATH."""
    info, sources = folder / "raw_fp4-1.0.dist-info", {"raw_fp4": RAW_FP4, **others}
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: raw-fp4\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[glm5_plugins]\n" + "".join(f"{name} = {name}\n" for name in sources))
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    return folder


def prompt(length: int, number: int) -> list[int]:
    """The prompt of a length and a number: the same for every server."""
    numbers = random.Random(f"{length}/{number}")
    return [numbers.randrange(256) for _ in range(length)]


def requests() -> Iterator[tuple[str, list[list[int]]]]:
    """Batches of prompts, each with what it shows."""
    for size in SIZES:
        for number in (0, 0, 1, 0):
            yield f"{size} repeated", [prompt(size, number)]
    for number in range(2, 5):
        for size in (1024, 64, 256, 64, 1024):
            yield "interleaved", [prompt(size, number)]
    yield "mixed in a batch", [prompt(64, 5), prompt(256, 5), prompt(64, 6)]
    yield "mixed in a batch", [prompt(256, 7), prompt(64, 7), prompt(256, 8)]
    for size in (63, 65, 200, 257, 1000, 1, 64, 2000):
        yield "odd sizes", [prompt(size, 9)]


def question(server: GpuServer) -> Iterator[dict[str, Any]]:
    """Ask everything, flush the cache, and ask it again."""
    for later in ("", ", after a flush"):
        if later:
            server.flush()
        for what, prompts in requests():
            for answer in server.ask(prompts):
                yield {"what": f"{what}{later}", "answer": answer}


def first_off(reference: list[dict[str, Any]], ours: list[dict[str, Any]]) -> float:
    """How far apart log-probabilities of first tokens are: those are prefill's, the later ones decoding's."""
    pairs = zip(reference, ours, strict=True)
    off: float = max(abs(one["answer"]["logprobs"][0] - other["answer"]["logprobs"][0]) for one, other in pairs)
    return off


def measure(server: GpuServer, times: int) -> dict[int, list[float]]:
    """Milliseconds of `times` prefills of each size, each of a prompt that is not cached."""
    found: dict[int, list[float]] = {}
    for size in SIZES:
        for number in range(5):
            server.prefill_ms(prompt(size, 1000 + number))
        found[size] = [server.prefill_ms(prompt(size, 2000 + number)) for number in range(times)]
        server.flush()
    return found


def differences(reference: list[dict[str, Any]], ours: list[dict[str, Any]]) -> tuple[list[str], float]:
    """Answers with other tokens, by what they show, and how far apart log-probabilities are."""
    wrong, largest = [], 0.0
    for expected, found in zip(reference, ours, strict=True):
        if expected["answer"]["tokens"] != found["answer"]["tokens"]:
            wrong.append(found["what"])
        pairs = zip(expected["answer"]["logprobs"], found["answer"]["logprobs"], strict=True)
        largest = max([largest, *(abs(one - other) for one, other in pairs)])
    return wrong, largest


def find_versions() -> dict[str, str]:
    """The versions that a result is of."""
    names = ("sglang", "flashinfer-python", "torch", "glm5-plugins")
    return {name: metadata.version(name) for name in names} | {"python": platform.python_version()}


def no_prefill_graph() -> list[str]:
    version = tuple(int(part) for part in metadata.version("sglang").split(".")[:3] if part.isdigit())
    return ["--disable-piecewise-cuda-graph"] if version < (0, 5, 14) else ["--cuda-graph-backend-prefill", "disabled"]


def run(mode: str, model: Path, site: Path, out: Path, times: int) -> dict[str, Any]:
    """One server from start to end."""
    plugins, variables = MODES[mode]
    folder = out / mode
    (folder / "reports").mkdir(parents=True)
    env = {
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "GLM5_PLUGINS": ",".join([*plugins, "raw_fp4"]),
        "GLM5_REPORT": str(folder / "reports"),
        **variables,
    }
    if "piecewise" in plugins:
        env["GLM5_PIECEWISE_TOKENS"] = ",".join(map(str, SIZES))
    server = GpuServer(model, folder, [] if "piecewise" in plugins else no_prefill_graph(), env)
    try:
        with server:
            print(f"{mode}: ready after {server.ready_after:.0f} s", flush=True)
            answers = list(question(server))
            timings = measure(server, times)
    except (ServerError, OSError) as error:
        print(f"{mode}: {error}", flush=True)
        return {"error": str(error)}
    reports = [json.loads(file.read_text()) for file in (folder / "reports").glob("*.json")]
    said = [
        f"{report['process']['role']}: {row['plugin']}: {row['verdict']}: {row['target']}: {row['reason']}"
        for report in reports
        for row in report["rows"]
        if row["plugin"] in plugins
    ]
    return {"ready_s": server.ready_after, "answers": answers, "ms": timings, "said": said}


def tables(results: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool]:
    """Both tables in Markdown, and whether every server came up and answered as the one without a graph."""
    reference = results["none"]
    right = "error" not in reference
    lines = [
        "| prefill graph | ready in | answers with other tokens | log-probabilities off by up to |",
        "|---|---|---|---|",
    ]
    for mode, result in results.items():
        if "error" in result or "error" in reference:
            right = False
            lines.append(f"| {mode} | {'not ready' if 'error' in result else 'ready'} | | |")
            continue
        wrong, off = differences(reference["answers"], result["answers"])
        right = right and not wrong
        named = f" ({', '.join(sorted(set(wrong)))})" if wrong else ""
        count = f"{len(wrong)} of {len(result['answers'])}{named}"
        lines.append(f"| {mode} | {result['ready_s']:.0f} s | {count} | {off:.3g} |")
    lines += ["", f"| prefill, median ms | {' | '.join(f'{size} tokens' for size in SIZES)} |", "|---|---|---|---|"]
    for mode, result in results.items():
        if "error" in result:
            continue
        cells = []
        for size in SIZES:
            median = statistics.median(result["ms"][size])
            share = f" ({median / statistics.median(reference['ms'][size]):.2f})" if "ms" in reference else ""
            cells.append(f"{median:.1f}{share}")
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    return "\n".join(lines), right


def add_modes(parser: argparse.ArgumentParser) -> None:
    """The option --modes, as a list."""

    def modes(text: str) -> list[str]:
        found = text.split(",")
        if found[0] != "none" or not set(found) <= set(MODES):
            raise argparse.ArgumentTypeError(f"{text}: begin with none, and choose from {', '.join(MODES)}")
        return found

    parser.add_argument(
        "--modes", type=modes, default="none,breakable,compile", help=f"some of {','.join(MODES)}; none comes first"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for logs, reports and prefill.json")
    add_modes(parser)
    parser.add_argument("--times", type=int, default=30, help="prefills to time for each size")
    options = parser.parse_args()
    modes: list[str] = options.modes
    import torch

    options.out.mkdir(parents=True, exist_ok=True)
    model, site = write_model(options.out / "model"), write_plugins(options.out / "site")
    versions = find_versions()
    results: dict[str, dict[str, Any]] = {}
    for mode in modes:
        results[mode] = run(mode, model, site, options.out, options.times)
        document = {"gpu": torch.cuda.get_device_name(), "versions": versions, "results": results}
        (options.out / "prefill.json").write_text(json.dumps(document, indent=1))
    (model / "model.safetensors").unlink()
    table, right = tables(results)
    print(f"\n{torch.cuda.get_device_name()}, {', '.join(f'{name} {value}' for name, value in versions.items())}\n")
    print(table)
    for mode, result in results.items():
        print(f"\n{mode}:", *result.get("said", [result.get("error", "")[-3000:]]), sep="\n  ")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
