"""What plugins and profiles choose, put to SGLang's own resolution: it accepts that and keeps it, and it raises or
overrides where they refuse.

The machine is stood in, and nothing of SGLang: `tests/servers/resolving.py` says how. One process answers for all
launches; SGLang is imported once for each kind of GPU.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from glm5_plugins.settings import profile as profiles
from packaging.specifiers import SpecifierSet

from glm5_plugins import flags
from glm5_plugins.checking import CAPABILITIES
from tests.servers.conftest import INSTALLED
from tests.support.server import cpu_environment
from tests.support.tiny_model import write_tiny_model

if INSTALLED is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

REPOSITORY = Path(__file__).parents[2]

FP4 = "--tp 8 --quantization modelopt_fp4"
CUTLASS = "--moe-runner-backend flashinfer_cutlass"
CUTEDSL = "--moe-runner-backend flashinfer_cutedsl"
DEEPEP = "--moe-a2a-backend deepep --deepep-mode low_latency"
# With this all-to-all SGLang wants data parallel attention over all ranks.
FLASHINFER = "--moe-a2a-backend flashinfer --dp 8 --enable-dp-attention"
MOE_DP = "--moe-dp-size 2 --attn-cp-size 2"  # SGLang wants both to be the same
SPANS = "The expert parallel size must be 1 or the same as the tensor parallel size"
NO_SBO_ON_SM90 = "SBO (single batch overlap) is not supported on SM90"


@dataclass(frozen=True)
class Adds:
    """The plugin adds this, and SGLang keeps it."""

    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Refuses:
    """The plugin refuses.

    Args:
        raises: What SGLang says to the same launch, once its main process or a rank resolves it.
        overrides: What SGLang makes of it instead, without asking.
        late: Why the plugin refuses what SGLang's resolution lets pass.
    """

    raises: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    late: str = ""


@dataclass(frozen=True)
class Row:
    """One launch.

    Args:
        name: For the test's id.
        argv: What the user types.
        expected: By a range of SGLang versions, the first that fits; with one, any version.
        arch: The kind of GPU.
        plugin: Which one is asked.
        options: Its variables, without their prefix.
        typed: What a user types who wants by hand what a plugin refuses.
        sglang: The versions that know the flags.
    """

    name: str
    argv: str
    expected: Mapping[str, Adds | Refuses] | Adds | Refuses
    arch: str = "sm120"
    plugin: str = "ep"
    options: Mapping[str, str] = field(default_factory=dict)
    typed: str = ""
    sglang: str = ""

    @property
    def expects(self) -> Adds | Refuses:
        if not isinstance(self.expected, Mapping):
            return self.expected
        return next(one for versions, one in self.expected.items() if is_sglang(versions))

    @property
    def launch(self) -> dict[str, Any]:
        return launch(
            self.arch,
            self.argv,
            plugins=[self.plugin],
            env={f"GLM5_{self.plugin.upper()}_{name}": value for name, value in self.options.items()},
            typed=self.typed.split(),
        )


def is_sglang(versions: str) -> bool:
    assert INSTALLED is not None
    return SpecifierSet(versions).contains(INSTALLED, prereleases=True)


def launch(arch: str, argv: str, **more: Any) -> dict[str, Any]:
    ask = ("ep_size", "tp_size", "moe_a2a_backend", "attn_dp_size")
    empty = {"plugins": [], "env": {}, "profile": "", "typed": [], "ask": ask}
    return {**empty, "capability": CAPABILITIES[arch], "argv": argv.split(), **more}


def sbo(fields: Mapping[str, Any] | None = None) -> Adds:
    return Adds({"enable_single_batch_overlap": True, **(fields or {})})


ROWS = (
    # --- ep ---
    Row("all-ranks", "--tp 8", Adds({"ep_size": 8})),
    Row("over-moe-dp", f"--tp 8 {MOE_DP}", Adds({"ep_size": 4})),
    Row("one-rank", "--tp 1", Adds({})),
    Row("given", "--tp 8 --ep-size=4", Adds({})),
    Row("half", "--tp 8 --moe-runner-backend triton", Adds({"ep_size": 4}), options={"SIZE": "4"}, typed="--ep-size 4"),
    Row(
        "part-with-flashinfer_cutlass",
        f"{FP4} {CUTLASS}",
        Refuses(raises=SPANS),
        options={"SIZE": "2"},
        typed="--ep-size 2",
    ),
    Row("given-part-with-flashinfer_cutlass", f"{FP4} {CUTLASS} --ep 2", Refuses(raises=SPANS)),
    Row("all-ranks-with-flashinfer_cutlass", f"{FP4} {CUTLASS}", Adds({"ep_size": 8})),
    Row(
        "part-with-the-runner-of-sm120",
        FP4,
        {">=0.5.13": Refuses(raises=SPANS), "<0.5.13": Adds({"ep_size": 2})},
        options={"SIZE": "2"},
        typed="--ep-size 2",
    ),
    # Without --quantization SGLang does not look at the checkpoint for its runner, on this GPU.
    Row("part-of-a-checkpoint-alone", "--tp 8", Adds({"ep_size": 2}), options={"SIZE": "2"}),
    Row(
        "part-with-flashinfer_cutedsl",
        f"{FP4} {CUTEDSL}",
        {">=0.5.11": Refuses(raises=SPANS), "<0.5.11": Adds({"ep_size": 2})},
        arch="sm100",
        options={"SIZE": "2"},
        typed="--ep-size 2",
    ),
    Row(
        "part-over-deepep",
        f"{FP4} {CUTEDSL} {DEEPEP}",
        # From 0.5.11 the rule of the runner is the first to see it.
        {">=0.5.11": Refuses(raises=SPANS), "<0.5.11": Refuses(overrides={"ep_size": 8})},
        arch="sm100",
        options={"SIZE": "4"},
        typed="--ep-size 4",
    ),
    Row(
        "part-of-moe-dp",
        f"--tp 8 {MOE_DP}",
        Refuses(raises="ep_size * moe_dp_size must be"),
        options={"SIZE": "2"},
        typed="--ep-size 2",
    ),
    Row(
        "no-divisor",
        "--tp 8 --moe-runner-backend triton",
        {
            ">=0.5.21": Refuses(raises="parallel topology is inconsistent"),
            "<0.5.21": Refuses(late="it is not checked: ranks are left without experts"),
        },
        options={"SIZE": "3"},
        typed="--ep-size 3",
    ),
    Row(
        "triton_kernel",
        "--tp 8 --moe-runner-backend triton_kernel",
        Refuses(late="SGLang checks it for GPT-OSS alone; the kernel routes over all experts for any model"),
        typed="--ep-size 8",
    ),
    Row(
        "experts-that-do-not-share-out",
        "--tp 6 --moe-runner-backend triton",
        Refuses(late="an assertion while the model is made"),
        typed="--ep-size 6",
    ),
    # --- moe_runner ---
    Row(
        "sm120",
        FP4,
        {
            "<0.5.10": Adds(
                {"moe_runner_backend": "flashinfer_cutlass", "fp4_gemm_runner_backend": "flashinfer_cudnn"}
            ),
            "<0.5.13": Adds({"moe_runner_backend": "flashinfer_cutlass"}),
            ">=0.5.13": Adds({}),
        },
        plugin="moe_runner",
    ),
    Row(
        "sm120-by-checkpoint",
        "--tp 8",
        {
            "<0.5.10": Adds(
                {"moe_runner_backend": "flashinfer_cutlass", "fp4_gemm_runner_backend": "flashinfer_cudnn"}
            ),
            ">=0.5.10": Adds({"moe_runner_backend": "flashinfer_cutlass"}),
        },
        plugin="moe_runner",
    ),
    Row("sm100", FP4, Adds({}), arch="sm100", plugin="moe_runner"),
    Row("sm90", FP4, Adds({}), arch="sm90", plugin="moe_runner"),
    Row(
        "sm100-over-deepep",
        f"{FP4} {DEEPEP}",
        Adds({"moe_runner_backend": "flashinfer_cutedsl"}),
        arch="sm100",
        plugin="moe_runner",
    ),
    Row(
        "sm100-over-flashinfer",
        f"{FP4} {FLASHINFER}",
        Adds({"moe_runner_backend": "flashinfer_cutlass"}),
        arch="sm100",
        plugin="moe_runner",
    ),
    *(
        Row(
            f"{runner}-on-sm120",
            f"{FP4} --moe-runner-backend {runner}",
            Refuses(late="its kernels are missed once the model runs"),
            plugin="moe_runner",
            sglang=since,
        )
        for runner, since in (
            ("flashinfer_trtllm", ""),
            ("flashinfer_trtllm_routed", ">=0.5.11"),
            ("flashinfer_cutedsl", ""),
        )
    ),
    Row(
        "fp4-gemm-of-sm100-on-sm120",
        f"{FP4} {CUTLASS} --fp4-gemm-backend flashinfer_trtllm",
        Refuses(late="its kernels are missed once the model runs"),
        plugin="moe_runner",
    ),
    Row(
        "by-options",
        FP4,
        Adds({"moe_runner_backend": "triton", "fp4_gemm_runner_backend": "flashinfer_cudnn"}),
        plugin="moe_runner",
        options={"RUNNER": "triton", "FP4_GEMM": "flashinfer_cudnn"},
    ),
    Row(
        "flashinfer_trtllm_routed",
        f"{FP4} --moe-runner-backend flashinfer_trtllm_routed",
        {"<0.5.11": Refuses(raises="Invalid quantization 'modelopt_fp4'"), ">=0.5.11": Adds({})},
        arch="sm100",
        plugin="moe_runner",
        sglang=">=0.5.10",
    ),
    *(
        Row(
            f"{runner}-for-modelopt",
            f"--tp 8 --quantization modelopt --moe-runner-backend {runner}",
            Refuses(raises="Invalid quantization 'modelopt'"),
            arch="sm100",
            plugin="moe_runner",
        )
        for runner in ("flashinfer_trtllm", "flashinfer_cutlass")
    ),
    Row(
        "flashinfer_cutlass-without-quantization",
        f"--tp 8 {CUTLASS}",
        {"<0.5.10": Refuses(raises="Invalid quantization 'modelopt'"), ">=0.5.10": Adds({})},
        arch="sm100",
        plugin="moe_runner",
    ),
    # --- mscclpp ---
    *(Row(f"{size}-ranks", f"--tp {size}", Adds({"enable_mscclpp": True}), plugin="mscclpp") for size in (8, 16)),
    Row(
        "4-ranks",
        "--tp 4",
        {">=0.5.21": Adds({"enable_mscclpp": True}), "<0.5.21": Refuses(late="NCCL instead, with a warning")},
        plugin="mscclpp",
        typed="--enable-mscclpp",
    ),
    Row(
        "2-ranks",
        "--tp 2",
        Refuses(late="NCCL instead, with a warning"),
        plugin="mscclpp",
        typed="--enable-mscclpp",
    ),
    # --- sbo ---
    Row("none", FP4, sbo(), plugin="sbo"),
    Row("deepep-cutedsl", f"{FP4} {DEEPEP} {CUTEDSL}", sbo(), arch="sm100", plugin="sbo"),
    Row("deepep-deep_gemm", f"--tp 8 {DEEPEP} --moe-runner-backend deep_gemm", sbo(), arch="sm100", plugin="sbo"),
    Row("flashinfer-cutlass", f"{FP4} {FLASHINFER} {CUTLASS}", sbo(), plugin="sbo"),
    *(
        Row(
            f"sm90-{runner}",
            f"--tp 8 {DEEPEP} --moe-runner-backend {runner}",
            {"<0.5.13": sbo(), ">=0.5.13": Refuses(raises=NO_SBO_ON_SM90)},
            arch="sm90",
            plugin="sbo",
            typed="--enable-single-batch-overlap",
        )
        for runner in ("deep_gemm", "triton")
    ),
    Row(
        "sm90-given",
        f"--tp 8 {DEEPEP} --enable-single-batch-overlap",
        {"<0.5.13": Adds({}), ">=0.5.13": Refuses(raises=NO_SBO_ON_SM90)},
        arch="sm90",
        plugin="sbo",
    ),
    Row(
        "megamoe",
        "--tp 8 --moe-a2a-backend megamoe",
        Refuses(raises="--moe-a2a-backend megamoe has no two-batch / single-batch overlap decomposition"),
        arch="sm100",
        plugin="sbo",
        typed="--enable-single-batch-overlap",
        sglang=">=0.5.21",
    ),
    # --- moe_autotune ---
    Row(
        "off",
        f"{FP4} {CUTLASS}",
        Adds({"disable_flashinfer_autotune": True}),
        plugin="moe_autotune",
        options={"ENABLED": "false"},
    ),
    Row(
        "skipping",
        f"{FP4} {CUTLASS}",
        Adds({"flashinfer_autotune_skip_ops": ["fp4_gemm"]}),
        plugin="moe_autotune",
        options={"SKIP_OPS": "fp4_gemm"},
        sglang=">=0.5.17",
    ),
)
HERE = {f"{row.plugin}-{row.name}": row for row in ROWS if is_sglang(row.sglang)}

# What `auto` becomes is asked of every kind of GPU.
AUTO = {
    f"{arch}-{quantization[15:] or 'by-checkpoint'}-{'deepep' if to_all else 'none'}": launch(
        arch, f"--tp 8 {quantization} {to_all}"
    )
    for arch in ("sm90", "sm100", "sm120")
    for quantization in ("--quantization modelopt_fp4", "")
    for to_all in ("", DEEPEP)
}


def backends() -> list[str]:
    """The all-to-all backends that this SGLang has besides none."""
    assert INSTALLED is not None
    flag = next(flag for flag in flags.of(flags.nearest(INSTALLED)) if flag.field == "moe_a2a_backend")
    return [choice for choice in flag.choices or () if choice != "none"]


SPANNING = {
    backend: launch(
        "sm100",
        f"--tp 8 --moe-a2a-backend {backend}",
        plugins=["ep"],
        env={"GLM5_EP_SIZE": "4"},
        typed=["--ep-size", "4"],
    )
    for backend in backends()
}

PROFILES = {
    one.name: launch(
        one.architecture[0],
        "--dist-init-addr 127.0.0.1:29500",  # asked for where there are several nodes
        profile=one.name,
    )
    for one in profiles.bundled()
    if is_sglang(one.sglang)
}


FIELD = "glm5-nvfp4-8x-rtx-pro-6000"
FUSION = "--enable-flashinfer-allreduce-fusion"


def piecewise() -> str:
    """How this SGLang is told to compile the prefill graph."""
    if is_sglang("<0.5.10"):
        return "--enable-piecewise-cuda-graph"
    return "--enforce-piecewise-cuda-graph" if is_sglang("<0.5.14") else "--cuda-graph-backend-prefill tc_piecewise"


NEXTN = "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1"
NEXTN += " --speculative-num-draft-tokens 4"

CASES = {
    "17": launch("sm120", f"{FUSION} {piecewise() if is_sglang('<0.5.22') else ''}", profile=FIELD),
    "17-without-the-profile": launch("sm120", f"{FP4} {FUSION}", ask=["enable_flashinfer_allreduce_fusion"]),
    "plugins-that-do-not-go-together": launch(
        "sm120",
        "--tp 8",
        plugins=["ep", "moe_runner"],
        env={"GLM5_EP_SIZE": "2"},
        typed=f"--ep-size 2 {CUTLASS}".split(),
    ),
    "18-by-default": launch("sm120", FP4, ask=["kv_cache_dtype"]),
    "18-by-profile": launch("sm120", "", profile=FIELD, ask=["kv_cache_dtype"]),
    "19": launch("sm120", NEXTN, profile=FIELD, ask=["disable_overlap_schedule"]),
    "19-without-the-profile": launch("sm120", f"{FP4} {NEXTN}", ask=["disable_overlap_schedule"]),
}


@functools.cache
def _answers(folder: Path) -> dict[str, dict[str, Any]]:
    launches = {
        **{f"row {name}": row.launch for name, row in HERE.items()},
        **{f"auto {name}": one for name, one in AUTO.items()},
        **{f"spanning {name}": one for name, one in SPANNING.items()},
        **{f"profile {name}": one for name, one in PROFILES.items()},
        **{f"case {name}": one for name, one in CASES.items()},
    }
    model = write_tiny_model(folder / "glm5", "glm_moe_dsa")
    for one in launches.values():
        one["argv"] = ["--model-path", str(model), *one["argv"]]
    return dict(zip(launches, resolve(list(launches.values()), folder), strict=True))


def resolve(launches: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Ask a process with stood-in GPUs."""
    command = folder / "bin" / "nvidia-smi"
    command.parent.mkdir(exist_ok=True)
    command.write_text("#!/bin/sh\necho 97887\n")
    command.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GLM5_", "SGLANG_"))}
    environment |= cpu_environment(Path(sys.executable))
    del environment["SGLANG_USE_CPU_ENGINE"]
    environment["PYTHONPATH"] += os.pathsep + str(REPOSITORY)
    environment["PATH"] = f"{command.parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.servers.resolving"],
        env=environment,
        input=json.dumps(launches),
        capture_output=True,
        text=True,
        timeout=600,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("ANSWERS")), None)
    assert line is not None, done.stderr
    found: list[dict[str, Any]] = json.loads(line.removeprefix("ANSWERS"))
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What became of every launch of this module, by kind and name."""
    return _answers(tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("name", HERE)
def test_the_tables_against_sglangs_resolution(answers: Mapping[str, Mapping[str, Any]], name: str) -> None:
    expected, found = HERE[name].expects, answers[f"row {name}"]
    if isinstance(expected, Adds):
        assert (found["refused"], found["error"]) == ("", "")
        assert found["added"] == dict(expected.fields)
        assert {field: found["resolved"][field] for field in expected.fields} == dict(expected.fields)
        return
    assert found["refused"], found
    if expected.raises:
        assert expected.raises in found["error"]
        return
    assert found["error"] == "", f"SGLang refuses it too: {found['error']}"
    if expected.overrides:
        assert {name: found["resolved"][name] for name in expected.overrides} == expected.overrides
    else:
        assert expected.late


@pytest.mark.parametrize("name", AUTO)
def test_what_auto_becomes(answers: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Rules ask what SGLang would choose; it chooses that."""
    found = answers[f"auto {name}"]
    assert found["error"] == ""
    # Where the arguments leave it at `auto`, the layer of NVFP4 experts takes one of these two.
    left = ("cutlass", "marlin")
    assert found["runner"] in left if found["runner_here"] == "auto" else found["runner"] == found["runner_here"]
    assert found["fp4_gemm"] == found["fp4_gemm_here"]


@pytest.mark.parametrize("backend", SPANNING)
def test_all_to_all_backends_that_span_all_ranks(answers: Mapping[str, Mapping[str, Any]], backend: str) -> None:
    """A part of the ranks is refused exactly where SGLang takes all of them, or refuses the backend here."""
    found = answers[f"spanning {backend}"]
    if found["error"]:
        others = ("flashinfer", "megamoe", "mori", "pplx", "deepep_v2", "flashinfer_megamoe", "ascend_fuseep")
        assert backend in others  # it wants another machine or more flags
        return
    assert bool(found["refused"]) == (found["resolved"]["ep_size"] == 8)


@pytest.mark.parametrize(
    "name",
    [name for name, row in HERE.items() if row.plugin == "sbo" and "a2a" in row.argv and isinstance(row.expects, Adds)],
)
def test_overlap_is_expected_where_sglang_overlaps(answers: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """`SboFlags` of SGLang itself, after its initialization."""
    found = answers[f"row {name}"]
    assert ("no effect expected" in found["said"]) is not found["overlaps"]


@pytest.mark.parametrize("name", [name for name, row in HERE.items() if row.plugin == "mscclpp"])
def test_mscclpp_among_the_numbers_of_ranks_that_sglang_supports(
    answers: Mapping[str, Mapping[str, Any]], name: str
) -> None:
    """Its resolution takes the flag with any number; its communicator looks at the number again, in each rank."""
    found = answers[f"row {name}"]
    assert (found["resolved"]["tp_size"] in found["mscclpp_sizes"]) is not bool(found["refused"])


def keeps(resolved: Mapping[str, Any], name: str, wanted: Any) -> bool:
    """Whether SGLang goes by what was asked for, in its own spelling."""
    found = resolved[name]
    spelled = {("speculative_algorithm", "NEXTN"): "EAGLE", ("kv_cache_dtype", "bf16"): "bfloat16"}
    if (name, wanted) in spelled:
        return bool(found == spelled[name, wanted])
    if name in ("dp_size", "enable_dp_attention") and "attn_dp_size" in resolved:
        return bool(resolved["attn_dp_size"] == 32)
    if isinstance(found, dict):
        return bool(found == json.loads(wanted))
    return bool(found == wanted)


@pytest.mark.parametrize("name", PROFILES)
def test_profiles(answers: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Everything that a profile and its plugins add is accepted, and SGLang keeps it."""
    found = answers[f"profile {name}"]
    assert (found["refused"], found["error"]) == ("", "")
    assert len(found["added"]) > 8
    lost = {
        name: (value, found["resolved"][name])
        for name, value in found["added"].items()
        if not keeps(found["resolved"], name, value)
    }
    assert lost == {}


def test_a_plugin_sees_what_another_adds(answers: Mapping[str, Mapping[str, Any]]) -> None:
    """The runner that one adds takes no size of the other's."""
    found = answers["case plugins-that-do-not-go-together"]
    assert "ep cannot be in force: the MoE runner flashinfer_cutlass" in found["refused"]
    assert SPANS in found["error"]


def test_all_reduce_fusion_of_other_gpus(answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Case 17: SGLang takes the flag on SM120 without a word; the profile refuses it with a compiled prefill graph."""
    assert answers["case 17-without-the-profile"]["error"] == ""
    assert ("for SM90 and SM100 only" in answers["case 17"]["refused"]) == is_sglang("<0.5.22")


def test_the_kv_cache_of_sm120(answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Case 18: what SGLang chooses itself is FP8, which is garbage before 0.5.17."""
    assert answers["case 18-by-default"]["resolved"]["kv_cache_dtype"] == "fp8_e4m3"
    by_profile = answers["case 18-by-profile"]["resolved"]["kv_cache_dtype"]
    assert by_profile == ("bfloat16" if is_sglang("<0.5.17") else "fp8_e4m3")


def test_the_second_version_of_speculative_decoding(answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Case 19: only it keeps the overlapped scheduler; up to 0.5.10 by the variable that the profile sets."""
    assert answers["case 19"]["error"] == ""
    assert answers["case 19"]["resolved"]["disable_overlap_schedule"] is False
    alone = answers["case 19-without-the-profile"]["resolved"]["disable_overlap_schedule"]
    assert alone is is_sglang("<0.5.11")
