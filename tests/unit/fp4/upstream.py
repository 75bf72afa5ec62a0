"""Stand-ins with the signatures of FlashInfer's `fp4_quantize`, by version; they record their calls."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

UNSET = object()

calls: list[dict[str, Any]] = []


def fp4_quantize_0_6_3(
    input,
    global_scale=None,
    sf_vec_size=16,
    sf_use_ue8m0=False,
    is_sf_swizzled_layout=True,
    is_sf_8x4_layout=False,
    enable_pdl=None,
):
    calls.append(dict(locals()))
    assert input.shape[-1] % sf_vec_size == 0
    return input, input


def fp4_quantize_0_6_8(
    input,
    global_scale=None,
    sf_vec_size=16,
    sf_use_ue8m0=False,
    is_sf_swizzled_layout=True,
    is_sf_8x4_layout=False,
    enable_pdl=None,
    backend="cuda",
):
    calls.append(dict(locals()))
    return input, input


def fp4_quantize_0_6_12(
    input,
    global_scale=None,
    sf_vec_size=16,
    sf_use_ue8m0=False,
    is_sf_swizzled_layout=True,
    is_sf_8x4_layout=False,
    is_global_scale_inversed=False,
    enable_pdl=None,
    backend="cuda",
):
    calls.append(dict(locals()))
    return input, input


def fp4_quantize_0_7_2(
    input,
    global_scale=None,
    sf_vec_size=16,
    sf_use_ue8m0=False,
    is_sf_swizzled_layout=True,
    is_sf_8x4_layout=False,
    is_global_scale_inversed=False,
    enable_pdl=None,
    backend="cuda",
    nvfp4_4over6=UNSET,
):
    calls.append(dict(locals()))
    return input, input


def fp4_quantize_0_7_4(
    input,
    global_scale=None,
    sf_vec_size=16,
    sf_use_ue8m0=False,
    is_sf_swizzled_layout=True,
    is_sf_8x4_layout=False,
    is_global_scale_inversed=False,
    enable_pdl=None,
    backend="auto",
    nvfp4_4over6=UNSET,
    *,
    batch_invariant=False,
):
    calls.append(dict(locals()))
    return input, input


VERSIONS: dict[str, Callable[..., Any]] = {
    "0.6.3": fp4_quantize_0_6_3,
    "0.6.8": fp4_quantize_0_6_8,
    "0.6.12": fp4_quantize_0_6_12,
    "0.7.2": fp4_quantize_0_7_2,
    "0.7.4": fp4_quantize_0_7_4,
}


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap as FlashInfer's API logging does."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def with_loader(function: Callable[..., Any], kernel: Callable[..., Any]) -> tuple[Callable[..., Any], list[str]]:
    """Give the function the globals through which FlashInfer finds its kernel; also return the look-ups."""
    log: list[str] = []

    def get_fp4_quantization_module(key: str) -> types.SimpleNamespace:
        log.append(key)
        return types.SimpleNamespace(fp4_quantize_sm100=kernel)

    scope = {
        **function.__globals__,
        "get_fp4_quantization_module": get_fp4_quantization_module,
        "get_compute_capability": lambda device: (12, 0),
        "device_support_pdl": lambda device: True,
    }
    return types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__), log
