"""Straight to the kernel: what a FlashInfer function looks up at each call, looked up once.

A shortcut is taken only where the function is the bare Python that was read for it, recognised by its parameters, the
names it uses and the parameters of the kernel function. Anything else keeps calling the function itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from glm5_plugins.fp4.layouts import TILE_COLUMNS, VECTOR_SIZES, LayoutRules, round_up

_KERNEL_PARAMETERS = (
    "input",
    "global_scale",
    "sf_vec_size",
    "sf_use_ue8m0",
    "is_sf_swizzled_layout",
    "is_sf_8x4_layout",
    "enable_pdl",
)


def fp4_quantize(function: Callable[..., Any], rules: LayoutRules) -> Callable[..., Any] | None:
    """Return `fp4_quantize` of FlashInfer 0.6.1 to 0.6.8.post1 without its loader.

    The first call on each device goes through the function, which checks, builds and loads; so does every call with a
    column-major input, another backend or sizes that it would refuse. From 0.6.10 on FlashInfer wraps the function in
    Python that can dump its calls, so it is called whole; the same holds at any log level above 0.

    Args:
        function: FlashInfer's.
        rules: the row of `layouts.LAYOUT_RULES` in force.

    Returns:
        A callable that takes the parameters of `function` by position, or None.
    """
    if inspect.unwrap(function) is not function or not inspect.isfunction(function):
        return None
    parameters = tuple(inspect.signature(function).parameters)
    scope = function.__globals__
    if parameters not in (_KERNEL_PARAMETERS, (*_KERNEL_PARAMETERS, "backend")) or not (
        {"get_fp4_quantization_module", "get_compute_capability", "device_support_pdl"} <= scope.keys()
    ):
        return None
    has_backend = parameters != _KERNEL_PARAMETERS
    kernels: dict[int, tuple[Callable[..., Any], bool] | None] = {}

    def look_up(device: torch.device) -> tuple[Callable[..., Any], bool] | None:
        major, minor = scope["get_compute_capability"](device)
        kernel = scope["get_fp4_quantization_module"](f"{major}{minor}").fp4_quantize_sm100
        if tuple(inspect.signature(kernel).parameters) != _KERNEL_PARAMETERS:
            return None
        return kernel, scope["device_support_pdl"](device)

    def quantize(
        input: torch.Tensor,
        global_scale: torch.Tensor | None = None,
        sf_vec_size: int = 16,
        sf_use_ue8m0: bool = False,
        is_sf_swizzled_layout: bool = True,
        is_sf_8x4_layout: bool = False,
        enable_pdl: bool | None = None,
        backend: str = "cuda",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = input.get_device()
        known = kernels.get(device)
        k = input.size(-1)
        if (
            known is None
            or backend != "cuda"
            or sf_vec_size not in VECTOR_SIZES
            or k % sf_vec_size
            or input.stride(-2) == 1  # column-major
        ):
            named: dict[str, Any] = {"backend": backend} if has_backend else {}
            outputs: tuple[torch.Tensor, torch.Tensor] = function(
                input=input,
                global_scale=global_scale,
                sf_vec_size=sf_vec_size,
                sf_use_ue8m0=sf_use_ue8m0,
                is_sf_swizzled_layout=is_sf_swizzled_layout,
                is_sf_8x4_layout=is_sf_8x4_layout,
                enable_pdl=enable_pdl,
                **named,
            )
            if device not in kernels and backend == "cuda":
                kernels[device] = look_up(input.device)
            return outputs
        kernel, supports_pdl = known
        packed, scales = kernel(
            input,
            global_scale,
            sf_vec_size,
            sf_use_ue8m0,
            is_sf_swizzled_layout,
            is_sf_8x4_layout,
            supports_pdl if enable_pdl is None else enable_pdl,
        )
        columns = k // sf_vec_size
        if is_sf_swizzled_layout and rules.pads_scale_columns:
            columns = round_up(columns, TILE_COLUMNS)
        return packed, scales.view(-1, columns)

    return quantize
