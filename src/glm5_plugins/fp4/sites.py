"""Where SGLang calls FlashInfer's FP4 functions raw, by version: one table, read without torch.

A raw call is one that reaches FlashInfer's own Python, which loads kernels inside the call. `calls` has a row of the
same name for each function, with what a torch operator of it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from glm5_plugins.environment import Environment
from glm5_plugins.patching import Probe
from glm5_plugins.prefill.upstream import NOTHING_COMPILES
from glm5_plugins.probes import AnyOf, SourceHas, SourceLacks, SourceSays

_QUANTIZATION = "sglang.srt.layers.quantization"
_MOE = "sglang.srt.layers.moe"

DENSE = f"{_QUANTIZATION}.modelopt_quant:fp4_quantize"
"""What SGLang's dense NVFP4 layers call; compressed-tensors layers import it from there. FlashInfer's on SM120 up to
0.5.11, another kernel's on other GPUs, and from 0.5.12 on SGLang's own operator."""

STASH = f"{_QUANTIZATION}.fp4_utils:_flashinfer_fp4_quantize"
"""What SGLang's own operator (from 0.5.12) calls, with its own choice of kernel: cute-dsl on SM100, cuda elsewhere."""

OWN_OPERATOR = SourceHas(
    f"{_QUANTIZATION}.fp4_utils:_flashinfer_fp4_quantize_impl", "this SGLang has its own operator around it"
)
"""What shows that its dense layers call FlashInfer through an operator."""

_TRACED = "traced"
_INSIDE_MOE = "inside the opaque MoE operator"  # but for top-k formats that bypass it
_ALL_TO_ALL = "all-to-all, so no compiled prefill graph"
_NO_COMPILED_GRAPH = "the prefill graph is no longer compiled by torch.compile (from 0.5.22)"
_KV = "NVFP4 KV cache"  # GLM-5 keeps its KV cache in bfloat16 or FP8
_OTHER_MODEL = "another model"


@dataclass(frozen=True)
class Site:
    """One module of SGLang that imports the function from FlashInfer, at its top or inside a function.

    Attributes:
        module: the module.
        sglang: the versions, a PEP 440 specifier.
        note: whether that code is traced, or why not.
    """

    module: str
    sglang: str
    note: str


@dataclass(frozen=True)
class Raw:
    """One FlashInfer function and where SGLang calls it.

    Attributes:
        function: its name in the package `flashinfer`, and that of its row in `calls`.
        requires: the versions in which code that may be traced calls it, as in `Patch.requires`.
        ends: what ended that.
        sites: everywhere it is called, but for the modules in `LOADING`.
        parameters: those that any FlashInfer version has, the one it always has first; its row in `calls` says what an
            operator makes of each.
        left: why it is not replaced, where it is not.
        outside: as in `Patch.outside`.
    """

    function: str
    requires: tuple[str, ...]
    ends: str
    sites: tuple[Site, ...]
    parameters: tuple[str, ...]
    left: str = ""
    outside: Probe = NOTHING_COMPILES

    @property
    def target(self) -> str:
        """The attribute that local imports read at each call, and whose copies the registry rebinds."""
        return f"flashinfer:{self.function}"

    @property
    def keep(self) -> tuple[str, ...]:
        """FlashInfer's own modules: what it calls itself is not SGLang's; and SGLang's stash."""
        homes = ("quantization.fp4_quantization", "quantization", "fp4_quantization", "activation")
        return (*(f"flashinfer.{home}:{self.function}" for home in homes), STASH)

    def not_needed(self, env: Environment) -> str | None:
        """Say why it is left as it is, or None."""
        return self.left or None

    def where(self, env: Environment) -> str:
        """The sites of the installed SGLang in words; all of them where its version cannot be placed."""
        version = env.version("sglang")
        modules: dict[str, list[str]] = {}
        for site in self.sites:
            if version is None or SpecifierSet(site.sglang).contains(version.public, prereleases=True):
                modules.setdefault(site.note, []).append(site.module.rpartition(".")[2])
        return "; ".join(f"{note}: {', '.join(names)}" for note, names in modules.items())


RAW = (
    Raw(
        "fp4_quantize",
        ("sglang>=0.5.8,<0.5.14", "flashinfer-python>=0.6.1"),
        "SGLang calls it through its own operator (from 0.5.12, the last raw call of a dense layer left in 0.5.14)",
        (
            Site(f"{_QUANTIZATION}.modelopt_quant", ">=0.5.8,<0.5.12", _TRACED),
            Site(
                f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4",
                ">=0.5.8,<0.5.12",
                _TRACED,
            ),
            Site("sglang.srt.models.deepseek_v2", ">=0.5.13,<0.5.14", _TRACED),
            Site(f"{_MOE}.token_dispatcher.standard", ">=0.5.8,<0.5.12", _INSIDE_MOE),
            Site(f"{_MOE}.token_dispatcher.flashinfer", ">=0.5.9,<0.5.12", _ALL_TO_ALL),
            Site(f"{_MOE}.fused_moe_triton.layer", ">=0.5.8,<0.5.10", _INSIDE_MOE),
            Site(f"{_MOE}.moe_runner.flashinfer_trtllm", ">=0.5.9,<0.5.12", _INSIDE_MOE),
            Site(f"{_MOE}.moe_runner.flashinfer_cutedsl", ">=0.5.11,<0.5.12", _INSIDE_MOE),
            Site(
                f"{_QUANTIZATION}.compressed_tensors.compressed_tensors_moe",
                ">=0.5.8,<0.5.9",
                _INSIDE_MOE,
            ),
            Site(
                f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe",
                ">=0.5.9,<0.5.12",
                _INSIDE_MOE,
            ),
            Site(f"{_QUANTIZATION}.kvfp4_tensor", ">=0.5.11", f"{_KV} on SM90"),
            Site(f"{_QUANTIZATION}.fp4_utils", ">=0.5.12", "inside SGLang's own operator"),
            Site("sglang.srt.layers.muse_spark.muse_spark_fp4_moe", ">=0.5.23", _OTHER_MODEL),
        ),
        (
            "input",
            "global_scale",
            "sf_vec_size",
            "sf_use_ue8m0",
            "is_sf_swizzled_layout",
            "is_sf_8x4_layout",
            "is_global_scale_inversed",
            "enable_pdl",
            "backend",
            "batch_invariant",
            "nvfp4_4over6",
        ),
        outside=SourceSays(
            "sglang.srt.models.deepseek_v2",
            "from sglang.srt.layers.quantization.fp4_utils import fp4_quantize",
            "this SGLang calls it through its own operator",
        ),
    ),
    Raw(
        "block_scale_interleave",
        ("sglang>=0.5.8,<0.5.22", "flashinfer-python>=0.6.1"),
        _NO_COMPILED_GRAPH,
        (
            Site(f"{_MOE}.token_dispatcher.standard", ">=0.5.8", _INSIDE_MOE),
            Site(f"{_MOE}.token_dispatcher.flashinfer", ">=0.5.9", _ALL_TO_ALL),
            Site(f"{_MOE}.moe_runner.flashinfer_trtllm", ">=0.5.10", "while weights are loaded"),
        ),
        ("unswizzled_sf", "out"),
    ),
    Raw(
        "nvfp4_kv_quantize",
        ("sglang>=0.5.11,<0.5.22", "flashinfer-python>=0.6.7"),
        _NO_COMPILED_GRAPH,
        (Site(f"{_QUANTIZATION}.kvfp4_tensor", ">=0.5.11", _KV),),
        ("input", "global_scale"),
        outside=AnyOf(
            (
                SourceLacks((f"{_QUANTIZATION}.kvfp4_tensor:NVFP4KVQuantizeUtil",), "nothing of this SGLang calls it"),
                NOTHING_COMPILES,
            )
        ),
    ),
    Raw(
        "scaled_fp4_grouped_quantize",
        ("sglang>=0.5.8,<0.5.22", "flashinfer-python>=0.6.1"),
        _NO_COMPILED_GRAPH,
        (Site(f"{_MOE}.flashinfer_cutedsl_moe", ">=0.5.8", _INSIDE_MOE),),
        ("a", "mask", "a_global_sf", "nvfp4_4over6"),
    ),
    Raw(
        "silu_and_mul_scaled_nvfp4_experts_quantize",
        ("sglang>=0.5.8,<0.5.22", "flashinfer-python>=0.6.1"),
        _NO_COMPILED_GRAPH,
        (
            Site(f"{_MOE}.flashinfer_cutedsl_moe", ">=0.5.8", _INSIDE_MOE),
            Site("sglang.srt.models.qwen2_moe", ">=0.5.19", f"{_TRACED}, {_OTHER_MODEL}"),
            Site("sglang.srt.models.qwen3_5", ">=0.5.19", _OTHER_MODEL),
        ),
        ("a", "mask", "a_global_sf", "nvfp4_4over6"),
    ),
    Raw(
        "nvfp4_quantize",
        ("sglang>=0.5.13,<0.5.22", "flashinfer-python>=0.6.8"),
        _NO_COMPILED_GRAPH,
        (
            Site(f"{_MOE}.moe_runner.flashinfer_trtllm", ">=0.5.13", _INSIDE_MOE),
            Site(f"{_MOE}.moe_runner.flashinfer_cutedsl", ">=0.5.18", _INSIDE_MOE),
            Site("sglang.srt.layers.muse_spark.muse_spark_fp4_moe", ">=0.5.23", _OTHER_MODEL),
        ),
        (
            "a",
            "a_global_sf",
            "sfLayout",
            "sf_vec_size",
            "enable_pdl",
            "backend",
            "batch_invariant",
            "do_shuffle",
            "per_token_activation",
            "expanded_idx_to_permuted_idx",
            "out_scale",
            "nvfp4_4over6",
        ),
        left="SGLang calls it inside its opaque MoE operator only, and per token, with an output more",
    ),
)
"""Every function. Not here: calls while weights are loaded, which nothing traces (`LOADING`)."""

LOADING = (
    f"{_QUANTIZATION}.mxfp4",
    f"{_QUANTIZATION}.mxfp4_flashinfer_cutlass_moe",
    f"{_QUANTIZATION}.mxfp4_flashinfer_trtllm_moe",
    f"{_QUANTIZATION}.fp8",
    f"{_QUANTIZATION}.utils",
    f"{_QUANTIZATION}.nvfp4_online",
    f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w4a4_mxint4_moe",
)
"""Modules that call one of the functions only while weights are loaded."""
