"""Which JIT modules of FlashInfer a launch uses: one table, by quantisation, backends, architecture and version."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from glm5_plugins.environment import Environment, Place, Window
from glm5_plugins.errors import ConfigurationError, did_you_mean

Arch = tuple[int, int]


@dataclass(frozen=True)
class Module:
    """One JIT module, named by the call that the runtime makes to get it.

    Args:
        name: The family: `fp4_quantization`.
        getter: FlashInfer's cached function, as `module:function`.
        arguments: What the runtime calls it with; another spelling of them would be another cache entry, and
            the runtime would load the module once more.
    """

    name: str
    getter: str
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True)
class Launch:
    """What decides the modules of one launch; backends by the names of SGLang's flags.

    Args:
        arch: Compute capability of the GPUs: `(12, 0)`.
        quantization: `--quantization`, or what the checkpoint says.
        moe_runner: `--moe-runner-backend`; empty for a model without experts.
        fp4_gemm: `--fp4-gemm-backend`.
        attention: The attention backends in use, those of DSA among them.
        allreduce_fusion: Whether `--enable-flashinfer-allreduce-fusion` is in force.
    """

    arch: Arch
    quantization: str = "modelopt_fp4"
    moe_runner: str = "auto"
    fp4_gemm: str = "auto"
    attention: frozenset[str] = frozenset()
    allreduce_fusion: bool = False


FP4 = frozenset({"modelopt_fp4", "modelopt_mixed", "compressed-tensors nvfp4"})

SM90 = frozenset({(9, 0)})
SM100 = frozenset({(10, 0), (10, 3)})
SM120 = frozenset({(12, 0), (12, 1)})


@dataclass(frozen=True)
class Rule:
    """One line of the table: on these GPUs, with these backends and versions, a launch uses this module.

    Args:
        name: The family of the module.
        getter: As in `Module`.
        arguments: From the architecture to what the runtime calls the getter with.
        archs: The GPUs the rule is about.
        why: What calls it.
        moe_runner: Values of `--moe-runner-backend`; empty where it does not matter.
        fp4_gemm: Values of `--fp4-gemm-backend`; empty where it does not matter.
        attention: Attention backends of which one must be in use; empty where it does not matter.
        allreduce_fusion: Whether the rule holds only with all-reduce fusion.
        requires: Version windows that must hold.
        ends: What ended a window with an upper bound.
        on_request: Whether SGLang itself uses the module in no launch, so that it must be asked for by name.
    """

    name: str
    getter: str
    arguments: Callable[[Arch], tuple[Any, ...]]
    archs: frozenset[Arch]
    why: str
    moe_runner: frozenset[str] = frozenset()
    fp4_gemm: frozenset[str] = frozenset()
    attention: frozenset[str] = frozenset()
    allreduce_fusion: bool = False
    requires: tuple[str, ...] = ()
    ends: str = ""
    on_request: bool = False

    def holds(self, launch: Launch, env: Environment) -> bool:
        """Whether this launch uses the module."""
        return (
            not self.on_request
            and launch.arch in self.archs
            and (not self.moe_runner or launch.moe_runner in self.moe_runner)
            and (not self.fp4_gemm or launch.fp4_gemm in self.fp4_gemm)
            and (not self.attention or bool(launch.attention & self.attention))
            and (launch.allreduce_fusion or not self.allreduce_fusion)
            and self.fits(env)
        )

    def fits(self, env: Environment) -> bool:
        """Whether the installed versions are those of the rule; absent and unplaceable ones are taken to be new."""
        return all(_inside(text, env) for text in self.requires)

    def module(self, arch: Arch) -> Module:
        """The module for one architecture."""
        return Module(self.name, self.getter, self.arguments(arch))


def _inside(window: str, env: Environment) -> bool:
    parsed = Window.parse(window)
    place = env.place(parsed)
    if place in (Place.ABSENT, Place.UNKNOWN):
        return not parsed.has_end
    return place is Place.INSIDE


def _key(arch: Arch) -> tuple[str]:
    """FlashInfer makes "120f" of "120" itself, below its cache: "120" is what the runtime asks for."""
    return (f"{arch[0]}{arch[1]}",)


def _major(arch: Arch) -> tuple[int]:
    return (arch[0],)


def _both(arch: Arch) -> tuple[int, int]:
    return arch


def _nothing(arch: Arch) -> tuple[()]:
    return ()


_QUANTIZE = "flashinfer.fp4_quantization:get_fp4_quantization_module"
_GEMM = "flashinfer.gemm.gemm_base:get_cutlass_fp4_gemm_module"
_MOE = "flashinfer.fused_moe.core:get_cutlass_fused_moe_module"

RULES: tuple[Rule, ...] = (
    Rule(
        "fp4_quantization",
        _QUANTIZE,
        _key,
        SM120,
        "activations of every FP4 layer, by flashinfer.fp4_quantize",
    ),
    Rule(
        "fp4_quantization",
        _QUANTIZE,
        _key,
        SM100,
        "activations of FP4 layers, by flashinfer.fp4_quantize",
        requires=("sglang<0.5.12",),
        ends="SGLang quantises with CuTe-DSL on SM100 from 0.5.12",
    ),
    Rule(
        "fp4_quantization",
        _QUANTIZE,
        _key,
        SM100,
        "activations and scale factors around FlashInfer's FP4 MoE",
        moe_runner=frozenset({"flashinfer_cutlass", "flashinfer_trtllm", "flashinfer_trtllm_routed"}),
    ),
    Rule(
        "fp4_quantization",
        _QUANTIZE,
        _key,
        SM90,
        "code besides SGLang's that calls flashinfer.fp4_quantize, which converts nothing before SM100",
        on_request=True,
    ),
    Rule(
        "cutlass_fp4_gemm",
        _GEMM,
        _both,
        SM100 | SM120,
        "FP4 matrix products, by flashinfer.mm_fp4; its own `auto` prepares every backend",
        fp4_gemm=frozenset({"flashinfer_cutlass", "auto"}),
        requires=("flashinfer-python>=0.6.3",),
    ),
    Rule(
        "cutlass_fp4_gemm",
        _GEMM,
        _major,
        SM100 | SM120,
        "FP4 matrix products, by flashinfer.mm_fp4",
        fp4_gemm=frozenset({"flashinfer_cutlass", "auto"}),
        requires=("flashinfer-python<0.6.3",),
        ends="the getter takes major and minor from 0.6.3",
    ),
    Rule(
        "trtllm_gemm",
        "flashinfer.gemm.gemm_base:get_trtllm_gemm_module",
        _nothing,
        SM100,
        "FP4 matrix products, by flashinfer.mm_fp4",
        fp4_gemm=frozenset({"flashinfer_trtllm"}),
    ),
    Rule(
        "cutlass_fused_moe",
        _MOE,
        _key,
        SM90 | SM100 | SM120,
        "experts, by flashinfer.cutlass_fused_moe",
        moe_runner=frozenset({"flashinfer_cutlass"}),
    ),
    Rule(
        "trtllm_fused_moe",
        "flashinfer.fused_moe.core:get_trtllm_moe_sm100_module",
        _nothing,
        SM100,
        "experts, by flashinfer.trtllm_fp4_block_scale_moe",
        moe_runner=frozenset({"flashinfer_trtllm", "flashinfer_trtllm_routed"}),
    ),
    Rule(
        "sparse_mla",
        "flashinfer.mla._sparse_mla_sm120:get_sparse_mla_sm120_module",
        _nothing,
        SM120,
        "sparse attention of DSA models",
        attention=frozenset({"flashinfer_sparse_mla"}),
        requires=("flashinfer-python>=0.6.14",),
    ),
    Rule(
        "allreduce_fusion",
        "flashinfer.comm.trtllm_ar:get_trtllm_comm_module",
        _nothing,
        SM90 | SM100,
        "all-reduce fused with the layer norm",
        allreduce_fusion=True,
    ),
)


@dataclass(frozen=True)
class Default:
    """What SGLang makes of `auto` for `--fp4-gemm-backend`, where it is known before the server runs."""

    archs: frozenset[Arch]
    value: str
    requires: str
    ends: str = ""


FP4_GEMM_DEFAULTS: tuple[Default, ...] = (
    Default(SM90 | SM100 | SM120, "auto", "sglang<0.5.10", "SGLang chooses itself from 0.5.10"),
    Default(SM120, "flashinfer_cudnn", "sglang>=0.5.10,<0.5.13", "CUTLASS is the choice from 0.5.13"),
    Default(SM120, "flashinfer_cutlass", "sglang>=0.5.13"),
    Default(SM100, "flashinfer_cutlass", "sglang>=0.5.10,<0.5.12", "CuTe-DSL is the choice from 0.5.12"),
    Default(SM100, "flashinfer_cutedsl", "sglang>=0.5.12"),
    Default(SM90, "flashinfer_cutlass", "sglang>=0.5.10,<0.5.13", "Marlin is the choice from 0.5.13"),
    Default(SM90, "marlin", "sglang>=0.5.13"),
)


def fp4_gemm_default(arch: Arch, env: Environment) -> str:
    """What SGLang makes of `--fp4-gemm-backend auto` on this architecture."""
    for default in FP4_GEMM_DEFAULTS:
        if arch in default.archs and _inside(default.requires, env):
            return default.value
    return "auto"


def modules_for(launch: Launch, env: Environment) -> dict[Module, str]:
    """The modules a launch uses, each once, with why; none for a model that is not quantised to FP4."""
    if launch.quantization not in FP4:
        return {}
    found: dict[Module, str] = {}
    for rule in RULES:
        if rule.holds(launch, env):
            found.setdefault(rule.module(launch.arch), rule.why)
    return found


def modules_named(names: Iterable[str], arch: Arch, env: Environment, given_as: str = "--modules") -> dict[Module, str]:
    """Modules by the name of their family, whatever the launch.

    Args:
        names: The families.
        arch: The architecture of the GPUs.
        env: The versions installed.
        given_as: What the names were given by, for errors.

    Raises:
        ConfigurationError: There is no such family, or none for this architecture and these versions.
    """
    found: dict[Module, str] = {}
    for name in names:
        rules = [rule for rule in RULES if rule.name == name]
        if not rules:
            known = {rule.name for rule in RULES}
            raise ConfigurationError(f"{given_as} names an unknown module {name!r}.", did_you_mean(name, known))
        fitting = [rule for rule in rules if arch in rule.archs and rule.fits(env)]
        if not fitting:
            archs = ", ".join(sorted({f"{a}.{b}" for rule in rules for a, b in rule.archs}))
            raise ConfigurationError(
                f"{given_as} {name}: there is none for {arch[0]}.{arch[1]} and the installed versions.",
                f"It is for the architectures {archs}" + "".join(f", {w}" for r in rules for w in r.requires) + ".",
            )
        found.setdefault(fitting[0].module(arch), fitting[0].why)
    return found


def parse_arch(text: str) -> Arch:
    """Read an architecture: `12.0f`, `12.0`, `120` and `sm_120` all mean `(12, 0)`.

    Raises:
        ConfigurationError: The text is none of these.
    """
    digits = text.lower().removeprefix("sm").removeprefix("_").rstrip("af")
    major, dot, minor = digits.partition(".")
    if not dot:
        major, minor = digits[:-1], digits[-1:]
    if not (major.isdigit() and minor.isdigit()):
        raise ConfigurationError(
            f"--arch {text!r} is not an architecture.", "Write it as 12.0f, 12.1, 10.0, 10.3 or 9.0."
        )
    return int(major), int(minor)


def arch_text(arch: Arch, env: Environment) -> str:
    """The architecture as FLASHINFER_CUDA_ARCH_LIST must spell it to mean what FlashInfer finds on such a GPU."""
    suffix = "f" if arch == (12, 0) and _inside("flashinfer-python>=0.6.7", env) else "a"
    return f"{arch[0]}.{arch[1]}{suffix}"
