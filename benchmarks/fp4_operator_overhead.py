"""CPU time of one `fp4_quantize` call: raw FlashInfer against the replacement and against the operator.

    python benchmarks/fp4_operator_overhead.py [--rows 8] [--columns 4096] [--rounds 200] [--calls 200]

`replacement` is what eager code calls, `operator` is what compiled code calls. Each is timed in turn with the raw call
within a round, in alternating order, and the ratio is taken round by round, so a slow moment of the machine falls on
both; the median of the ratios is what counts. On a CUDA device the real kernel is launched and not waited for, and
rounds are separated by a synchronisation outside the timing. Without one, the installed FlashInfer's own Python runs on
CPU tensors with kernels that do nothing; without FlashInfer a stand-in takes its place. Both say so, and show what
Python costs, not what a launch costs.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import statistics
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from glm5_plugins.fp4.calls import FP4_QUANTIZE
from glm5_plugins.fp4.operator import Operator

Quantize = Callable[..., Any]


def standin(
    input: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate outputs as FlashInfer does and launch nothing."""
    rows, k = input.shape
    packed = torch.empty((rows, k // 2), dtype=torch.uint8, device=input.device)
    scales = torch.empty((-(-rows // 128) * 128 * (k // sf_vec_size),), dtype=torch.uint8, device=input.device)
    return packed, scales.reshape(-1, k // sf_vec_size)


def disarm(function: Quantize) -> None:
    """Let FlashInfer find kernels that do nothing, and an SM120 device, on a machine without one."""
    torch.version.cuda = "13.0"
    scope = inspect.unwrap(function).__globals__
    kernels = types.SimpleNamespace(fp4_quantize=lambda *arguments: None)
    spec = types.SimpleNamespace(build_and_load=lambda: kernels)
    scope.update({name: lambda: spec for name in scope if name.startswith("gen_fp4_quantization_sm")})
    scope["get_compute_capability"] = functools.cache(lambda device: (12, 0))
    scope["device_support_pdl"] = lambda device: scope["get_compute_capability"](device)[0] >= 9
    scope["_check_block_scale_quantization_support"] = lambda device, name: None


def microseconds_per_call(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) / calls / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=200, help="calls in a round; fewer than the launch queue holds")
    options = parser.parse_args()

    real = torch.cuda.is_available()
    device = "cuda" if real else "cpu"
    operator = Operator(FP4_QUANTIZE)
    raw: Quantize
    try:
        import flashinfer
    except ImportError:
        raw, version = standin, "0.6.3"
        described = "none: a stand-in"
    else:
        raw, version = flashinfer.fp4_quantize, flashinfer.__version__
        described = version if real else f"{version}, kernels that do nothing"
    operator.bind(raw, version=version)
    subjects = {"replacement": operator.replacement, "operator": operator.overload}
    if not real:
        if raw is not standin:
            disarm(raw)
        # The CPU kernel refuses by design. In this process only, the CUDA one serves CPU tensors.
        warnings.simplefilter("ignore", UserWarning)
        operator.bound._library.impl("fp4_quantize", operator.bound.on_cuda, "CPU", allow_override=True)
        # The replacement would see no CUDA tensor; this is what it calls for one.
        subjects["replacement"] = operator.bound.on_cuda

    input = torch.randn(options.rows, options.columns, device=device).to(torch.bfloat16)
    scale = torch.ones(1, device=device)

    def synchronise() -> None:
        if real:
            torch.cuda.synchronize()

    results: dict[str, Any] = {}
    with torch.inference_mode():
        for name, quantize in subjects.items():
            pair = [lambda: raw(input, scale), lambda quantize=quantize: quantize(input, scale)]
            for call in pair:
                microseconds_per_call(call, options.calls)
            times: list[list[float]] = [[], []]
            for number in range(options.rounds):
                for which in (0, 1) if number % 2 else (1, 0):
                    synchronise()
                    times[which].append(microseconds_per_call(pair[which], options.calls))
            ratios = sorted(after / before for before, after in zip(*times, strict=True))
            results[name] = {
                "raw_us": round(statistics.median(times[0]), 2),
                "us": round(statistics.median(times[1]), 2),
                "ratio_median": round(statistics.median(ratios), 4),
                "ratio_quartiles": [round(value, 4) for value in statistics.quantiles(ratios, n=4)[::2]],
            }

    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if real else "none",
                "torch": torch.__version__,
                "flashinfer": described,
                "shape": [options.rows, options.columns],
                "shortcut": operator.bound.takes_shortcut,
                **results,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
