"""What a launch uses, read from a running server or from a model's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from glm5_plugins.environment import Environment, Place, Window
from glm5_plugins.errors import ConfigurationError, did_you_mean
from glm5_plugins.warmup.needs import Arch, Launch, fp4_gemm_default

_FP4_GEMM = "sglang.srt.layers.quantization.fp4_utils:get_fp4_gemm_runner_backend"
_MOE = "sglang.srt.layers.moe.utils:get_moe_runner_backend"

# From the record of arguments to what SGLang made of them; before 0.5.15 the record itself is resolved.
_RESOLVED = (
    ("sglang>=0.5.15,<0.5.19", "sglang.srt.arg_groups.overrides:resolved_view"),
    ("sglang>=0.5.19", "sglang.srt.arg_groups.model_override_base:resolved_view"),
)
_ATTENTION = (
    ("sglang>=0.5.8", ("attention_backend", "prefill_attention_backend", "decode_attention_backend")),
    ("sglang>=0.5.13", ("dsa_prefill_backend", "dsa_decode_backend")),  # named nsa_* before
)
_OF_DSA = ("--dsa-prefill-backend", "--dsa-decode-backend", "--nsa-prefill-backend", "--nsa-decode-backend")


def of_server(model_runner: Any, arch: Arch, env: Environment) -> Launch:
    """Read the launch that a model runner is part of, after its model is loaded.

    Args:
        model_runner: SGLang's `ModelRunner`.
        arch: The compute capability of its GPU.
        env: The versions installed.
    """
    arguments = model_runner.server_args
    for window, place in _RESOLVED:
        if env.place(Window.parse(window)) is Place.INSIDE:
            arguments = _at(place)(arguments)
    names = [name for window, fields in _ATTENTION if _newer(window, env) for name in fields]
    config = model_runner.model_config
    return Launch(
        arch=arch,
        quantization=_named(config.quantization or "", getattr(config.hf_config, "quantization_config", None) or {}),
        moe_runner=str(_at(_MOE)().value) if _has_experts(vars(config.hf_text_config)) else "",
        fp4_gemm=str(_at(_FP4_GEMM)().value),
        attention=frozenset(str(value) for name in names if (value := getattr(arguments, name))),
        allreduce_fusion=bool(arguments.enable_flashinfer_allreduce_fusion),
    )


def of_model(
    folder: Path, arch: Arch, env: Environment, *, moe_runner: str, fp4_gemm: str, attention: str = ""
) -> Launch:
    """Read a launch from a model's folder and the flags that choose backends.

    Args:
        folder: A folder with `config.json` and, for ModelOpt, `hf_quant_config.json`.
        arch: The architecture of the GPUs it will run on.
        env: The versions installed.
        moe_runner: `--moe-runner-backend`.
        fp4_gemm: `--fp4-gemm-backend`; `auto` becomes what SGLang makes of it.
        attention: `--attention-backend`, or one of DSA; empty for none that matters.

    Raises:
        ConfigurationError: The folder holds no model that can be read, or a backend is none of any SGLang.
    """
    config = _json(folder / "config.json")
    quantization = config.get("quantization_config") or {}
    if not quantization and (folder / "hf_quant_config.json").is_file():
        quantization = _json(folder / "hf_quant_config.json").get("quantization", {})
    launch = of_flags(arch, env, moe_runner=moe_runner, fp4_gemm=fp4_gemm, attention=attention)
    experts = _has_experts(config.get("text_config", config))
    return replace(launch, quantization=_quantization(quantization), moe_runner=moe_runner if experts else "")


def of_flags(arch: Arch, env: Environment, *, moe_runner: str, fp4_gemm: str, attention: str = "") -> Launch:
    """A launch of an NVFP4 model with experts; see `of_model`.

    Raises:
        ConfigurationError: A backend is none of any SGLang.
    """
    _be_one_of("--moe-runner-backend", moe_runner)
    _be_one_of("--fp4-gemm-backend", fp4_gemm)
    if attention:
        _be_one_of("--attention-backend", attention, *_OF_DSA)
    return Launch(
        arch=arch,
        moe_runner=moe_runner,
        fp4_gemm=fp4_gemm_default(arch, env) if fp4_gemm == "auto" else fp4_gemm,
        attention=frozenset({attention} - {""}),
    )


def _be_one_of(option: str, value: str, *others: str) -> None:
    from glm5_plugins import flags  # not in a server: it knows its own

    known = {choice for name in (option, *others) for flag in flags.with_option(name) for choice in flag.choices or ()}
    if value not in known:
        what = f"{option} {value!r} is a value of no SGLang from {flags.versions()[0]} on."
        raise ConfigurationError(what, did_you_mean(value, known, "`python -m sglang.launch_server --help`"))


def _quantization(config: Mapping[str, Any]) -> str:
    """SGLang's name for what a checkpoint says about itself."""
    algorithm = str(config.get("quant_algo", "")).upper()
    if algorithm == "NVFP4":
        return "modelopt_fp4"
    if algorithm == "MIXED_PRECISION":
        return "modelopt_mixed"
    return _named(str(config.get("quant_method", "")).lower(), config)


def _named(method: str, config: Any) -> str:
    """Tell FP4 among the many formats that compressed-tensors holds."""
    if method == "compressed-tensors" and "nvfp4" in json.dumps(config, default=str).lower():
        return "compressed-tensors nvfp4"
    return method


def _has_experts(config: Mapping[str, Any]) -> bool:
    return any(config.get(name) for name in ("n_routed_experts", "num_experts", "num_local_experts"))


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--model-path {path.parent} holds no model: {path.name}: {error}.",
            "Name a folder with the model's config.json, or choose with --modules.",
        ) from error
    return dict(found)


def _at(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _newer(window: str, env: Environment) -> bool:
    return env.place(Window.parse(window)) in (Place.INSIDE, Place.UNKNOWN)
