"""Profiles: every bundled one on every version it is meant for, and what a wrong file is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from glm5_plugins.settings import profile as profiles
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from glm5_plugins import Environment, arguments, flags
from glm5_plugins.checking import CAPABILITIES
from glm5_plugins.errors import ConfigurationError
from glm5_plugins.manager import BUNDLED, PluginManager
from glm5_plugins.preset import Preset
from glm5_plugins.rules import Launch
from tests.unit.choosing.conftest import VERSIONS

EVERY = [
    (name, version)
    for name in profiles.known()
    for version in VERSIONS
    if Launch(Environment({"sglang": version}, elsewhere=True), {}).is_sglang(profiles.load(name).sglang)
]


def launch(version: str, arch: str = "sm120", **given: object) -> Launch:
    return Launch(Environment({"sglang": version}, CAPABILITIES[arch], elsewhere=True), given)


@pytest.mark.parametrize(("name", "version"), EVERY)
def test_its_arguments_are_flags_of_that_version(name: str, version: str) -> None:
    """Field, spelling and value: SGLang's own parser of that version takes them."""
    profile = profiles.load(name)
    here = launch(version, profile.architecture[0])
    by_field: dict[str, list[flags.Flag]] = {}
    for flag in flags.of(version):
        by_field.setdefault(flag.field, []).append(flag)
    wanted = profile.arguments_for(here)
    assert arguments.flags(flags.parser_of(version), wanted)
    for field, value in wanted.items():
        choices = next((flag.choices for flag in by_field[field] if flag.kind == "value"), None)
        assert choices is None or str(value) in choices, (field, value)
        assert not any(flag.gone for flag in by_field[field])


@pytest.mark.parametrize(("name", "version"), EVERY)
def test_it_keeps_its_own_rules_and_its_plugins_agree(name: str, version: str) -> None:
    profile = profiles.load(name)
    env = Environment({"sglang": version}, CAPABILITIES[profile.architecture[0]], elsewhere=True)
    preset = Preset(profile, env)
    preset.take_effect_on_settings()
    complete = preset.complete({})
    manager = PluginManager()
    manager.load(profile.plugins)
    added = manager.server_args(env, complete)
    preset.judge({**complete, **{field: value for field, (_, value) in added.items()}})
    assert [w for w in preset.warnings if "sparse attention patched out" not in w] == []


@pytest.mark.parametrize("name", [name for name in profiles.known() if "rtx-pro-6000" in name])
def test_the_fp4_plugins_are_where_they_are_in_force(name: str) -> None:
    """SGLang calls FlashInfer's FP4 functions raw in code that it compiles up to 0.5.13; any version builds them."""
    profile = profiles.load(name)
    raw = [one for one in VERSIONS if SpecifierSet(profile.sglang).contains(one) and Version(one) < Version("0.5.14")]
    assert "fp4_warmup" in profile.plugins
    assert ("fp4_custom_op" in profile.plugins) == bool(raw)


@pytest.mark.parametrize("name", profiles.known())
def test_it_says_where_it_comes_from(name: str) -> None:
    profile = profiles.load(name)
    assert all(source.startswith("https://") for source in profile.source)
    assert set(profile.plugins) <= set(BUNDLED)


@pytest.mark.parametrize("version", VERSIONS)
def test_kv_cache_on_sm120(version: str) -> None:
    """Case 18: FP8 in the KV cache gives garbage before 0.5.17; `auto` is FP8 there."""
    preset = Preset(profiles.load("glm5-nvfp4-8x-rtx-pro-6000"), launch(version).env)
    early = VERSIONS.index(version) < VERSIONS.index("0.5.17")
    assert (preset.complete({}).get("kv_cache_dtype") == "bf16") == early
    preset.judge(preset.complete({"quantization": "modelopt_fp4", "kv_cache_dtype": "fp8_e4m3"}))
    assert any("one token and then garbage" in warning for warning in preset.warnings) == early


@pytest.mark.parametrize("version", VERSIONS)
def test_all_reduce_fusion_on_sm120_with_a_piecewise_graph(version: str) -> None:
    """Case 17: refused on every version that can compile the prefill graph; a warning on the others."""
    here = VERSIONS.index(version)
    before = [VERSIONS.index(bound) for bound in ("0.5.10", "0.5.14", "0.5.22")]
    piecewise = (
        {"enable_piecewise_cuda_graph": True}
        if here < before[0]
        else {"enforce_piecewise_cuda_graph": True}
        if here < before[1]
        else {"cuda_graph_backend_prefill": "tc_piecewise"}
    )
    preset = Preset(profiles.load("glm5-nvfp4-8x-rtx-pro-6000"), launch(version).env)
    complete = preset.complete({"enable_flashinfer_allreduce_fusion": True, **piecewise})
    if here < before[2]:
        with pytest.raises(ConfigurationError, match="for SM90 and SM100 only, and with a piecewise graph"):
            preset.judge(complete)
    else:
        preset.judge(complete)
        assert any("on SM120 it does nothing" in warning for warning in preset.warnings)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("algorithm", ["NEXTN", "EAGLE", None])
def test_second_version_of_speculative_decoding(version: str, algorithm: str | None) -> None:
    """Case 19: without it the model is loaded twice; from 0.5.11 it is the default, from 0.5.14 gone."""
    preset = Preset(profiles.load("glm5-nvfp4-8x-rtx-pro-6000"), launch(version).env)
    environ: dict[str, str] = {}
    given = {} if algorithm is None else {"speculative_algorithm": algorithm}
    preset.set_variables(Launch(preset.env, preset.complete(given)), environ)
    needed = algorithm is not None and VERSIONS.index(version) < VERSIONS.index("0.5.11")
    assert environ.get("SGLANG_ENABLE_SPEC_V2") == ("True" if needed else None)
    assert any("SGLANG_ENABLE_SPEC_V2=True" in note for note in preset.notes()) == needed


@pytest.mark.parametrize("name", ["glm5.1-nvfp4-8x-rtx-pro-6000", "glm5.2-nvfp4-8x-rtx-pro-6000"])
def test_shared_experts_are_not_fused_in_5_1_and_5_2(name: str) -> None:
    assert profiles.load(name).arguments_for(launch("0.5.23"))["disable_shared_experts_fusion"] is True


@pytest.mark.parametrize(
    "model",
    [
        "lukealonso/GLM-5-NVFP4",
        "lukealonso/glm-5-nvfp4",
        "GLM-5-NVFP4",
        "/models/GLM-5-NVFP4/",
        "./glm-5-nvfp4//",
        "/cache/hub/models--lukealonso--GLM-5-NVFP4/snapshots/0a1b2c3d",
        "/cache/hub/models--lukealonso--GLM-5-NVFP4/",
    ],
)
def test_a_model_is_recognised_however_its_path_is_spelled(model: str) -> None:
    """Case 18."""
    profile = profiles.load("glm5-nvfp4-8x-rtx-pro-6000")
    assert profile.fits(launch("0.5.12", model_path=model))


@pytest.mark.parametrize(
    "model", ["zai-org/GLM-5", "GLM-5-NVFP4-REAP", "/GLM-5-NVFP4/other", "models--GLM-5-NVFP4", ""]
)
def test_another_model_is_not_taken_for_it(model: str) -> None:
    assert not profiles.load("glm5-nvfp4-8x-rtx-pro-6000").fits(launch("0.5.12", model_path=model))


def test_what_is_set_stays_and_is_said() -> None:
    preset = Preset(profiles.load("glm5-nvfp4-8x-rtx-pro-6000"), launch("0.5.23").env)
    environ = {"OMP_NUM_THREADS": "32", "NCCL_IB_DISABLE": "1"}
    preset.set_variables(launch("0.5.23"), environ)
    assert environ["OMP_NUM_THREADS"] == "32"
    assert environ["NCCL_P2P_LEVEL"] == "PHB"
    assert preset.kept == {"OMP_NUM_THREADS": "32"}
    assert "NCCL_IB_DISABLE" not in preset.set
    assert "profile glm5-nvfp4-8x-rtx-pro-6000: OMP_NUM_THREADS=32 was set and stays" in preset.notes()


def test_another_version_and_another_gpu_are_said() -> None:
    preset = Preset(profiles.load("glm5.2-nvfp4-8x-rtx-pro-6000"), launch("0.5.9", "sm100").env)
    preset.judge({})
    assert "is meant for SGLang >=0.5.17, and this is SGLang 0.5.9" in preset.warnings[0]
    assert "and this GPU is SM100" in preset.warnings[1]


MINIMAL = 'summary = "s"\nsglang = ">=0.5.9"\nhardware = "h"\nsource = ["https://x"]\n'


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINIMAL + 'includes = ["sm120"]\n[arguments]\ntp_size = 4\n')
    profile = profiles.load(str(file))
    assert profile.name == "mine"
    assert profile.arguments_for(launch("0.5.23"))["tp_size"] == 4
    assert profile.arguments_for(launch("0.5.23", tp_size=8)) == {}
    assert profile.rules


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("summary = ", "is not TOML"),
        ("\xff", "is not TOML"),
        ("", "summary: Field required"),
        (MINIMAL + "plugin = ['ep']", "plugin: Extra inputs are not permitted"),
        (MINIMAL.replace(">=0.5.9", "0.5"), "sglang: Value error, '0.5' is no version range"),
        (MINIMAL + "[environment]\nPYTHONNOUSERSITE = '1'", "is read before a profile can set it"),
        (
            MINIMAL + "[environment]\nOMP_NUM_THREADS = 8",
            "set.OMP_NUM_THREADS: Input should be a valid string",
        ),
        (MINIMAL + "includes = ['sm12']", "Did you mean 'sm120'?"),
        (MINIMAL + "[options]\nEP_SIZE = '4'", "options.EP_SIZE"),
        (MINIMAL + "#" * profiles.LARGEST, "is larger than"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError) as refused:
        profiles.load(str(file))
    assert says in str(refused.value)
    assert "\n" in str(refused.value)


@pytest.mark.parametrize(("name", "mend"), [("glm5-nvfp4-8x-rtx-pro-600", "Did you mean"), ("./none.toml", "Give the")])
def test_there_is_no_such_profile(name: str, mend: str) -> None:
    with pytest.raises(ConfigurationError, match="GLM5_PROFILE") as refused:
        profiles.load(name)
    assert mend in str(refused.value)
