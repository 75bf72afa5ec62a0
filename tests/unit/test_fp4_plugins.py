"""`fp4_custom_op` and `fp4_graph_break` before anything is applied: versions, source builds, who goes with whom."""

from __future__ import annotations

import pytest

from glm5_plugins.environment import Environment
from glm5_plugins.errors import ConfigurationError
from glm5_plugins.fp4.sites import DENSE, OWN_OPERATOR, RAW, STASH
from glm5_plugins.manager import PluginManager
from glm5_plugins.patching import Registry

FLASHINFER = {
    "0.5.8": "0.6.1",
    "0.5.9": "0.6.3",
    "0.5.11": "0.6.8.post1",
    "0.5.12": "0.6.11.post1",
    "0.5.12+cu130": "0.6.11.post1+cu130",
    "0.5.13": "0.6.11.post1",
    "0.5.14": "0.6.12",
    "0.5.21": "0.7.0",
    "0.5.22": "0.7.1",
    "0.5.23": "0.7.2",
}
READY, NOT_NEEDED, NOT_APPLICABLE = "waiting", "not needed", "not applicable"


def judged(plugin: str, sglang: str | None, flashinfer: str | None = None, **more) -> dict[str, tuple[str, str]]:
    """Verdict and reason of every patch of a plugin, by target."""
    versions = {"sglang": sglang, "flashinfer-python": flashinfer or FLASHINFER.get(sglang or "", "0.6.3")}
    env = Environment(versions, **more)
    manager = PluginManager()
    manager.load([*PluginManager.find(plugin).requires, plugin])
    registry = Registry(env)
    patches = [patch for one, patch in manager.patches(env) if one.name == plugin]
    found = {patch.target: registry.judge(patch) for patch in patches}
    return {target: (verdict.value, reason) for target, (verdict, reason) in found.items()}


@pytest.mark.parametrize(
    ("sglang", "dense", "fp4_quantize", "interleave"),
    [
        ("0.5.7", NOT_APPLICABLE, NOT_APPLICABLE, NOT_APPLICABLE),
        ("0.5.8", READY, READY, READY),
        ("0.5.9", READY, READY, READY),
        ("0.5.11", READY, READY, READY),
        ("0.5.12", NOT_NEEDED, READY, READY),
        ("0.5.12+cu130", NOT_NEEDED, READY, READY),
        ("0.5.13", NOT_NEEDED, READY, READY),
        ("0.5.14", NOT_NEEDED, NOT_NEEDED, READY),
        ("0.5.21", NOT_NEEDED, NOT_NEEDED, READY),
        ("0.5.22", NOT_NEEDED, NOT_NEEDED, NOT_NEEDED),
        ("0.5.23", NOT_NEEDED, NOT_NEEDED, NOT_NEEDED),
    ],
)
def test_the_window_of_each_function(sglang: str, dense: str, fp4_quantize: str, interleave: str) -> None:
    found = judged("fp4_custom_op", sglang)
    assert found[DENSE][0] == dense
    assert found["flashinfer:fp4_quantize"][0] == fp4_quantize
    assert found["flashinfer:block_scale_interleave"][0] == interleave


def test_what_upstream_wraps_is_said_to_be_not_needed_and_why() -> None:
    verdict, reason = judged("fp4_custom_op", "0.5.12")[DENSE]
    assert (verdict, reason) == (
        NOT_NEEDED,
        "sglang 0.5.12: SGLang has its own operator here, sglang::flashinfer_fp4_quantize (from 0.5.12)",
    )


def test_the_call_that_is_not_replaced_says_why() -> None:
    verdict, reason = judged("fp4_custom_op", "0.5.14")["flashinfer:nvfp4_quantize"]
    assert verdict == NOT_NEEDED
    assert "inside its opaque MoE operator only" in reason


def test_calls_are_counted_without_torch(run) -> None:
    """A start that fails early has a last report too, and may have no PyTorch."""
    run("""
        import sys
        from glm5_plugins.environment import Environment
        from glm5_plugins.manager import PluginManager
        manager = PluginManager()
        manager.load(["fp4_custom_op"])
        counters = [patch.counter for _, patch in manager.patches(Environment({"sglang": "0.5.9"}))]
        assert counters and not any(counter() for counter in counters)
        assert "torch" not in sys.modules
    """)


def test_without_flashinfer_or_with_an_old_one_nothing_applies() -> None:
    assert {verdict for verdict, _ in judged("fp4_custom_op", None).values()} == {NOT_APPLICABLE}
    found = judged("fp4_custom_op", "0.5.9", flashinfer="0.5.3")
    assert found["flashinfer:fp4_quantize"] == (
        NOT_APPLICABLE,
        "flashinfer-python 0.5.3 is older than flashinfer-python>=0.6.1",
    )


@pytest.mark.parametrize(("own_operator", "verdict"), [(True, NOT_NEEDED), (False, READY)])
def test_a_build_from_source_is_judged_by_its_symbols(tmp_path, own_operator: bool, verdict: str) -> None:
    """Case 10 of the field."""
    source = {
        "sglang/__init__.py": "",
        OWN_OPERATOR.target.partition(":")[0].replace(".", "/") + ".py": "def _flashinfer_fp4_quantize_impl(): ...\n",
        "sglang/srt/models/deepseek_v2.py": "def f():\n    " + RAW[0].outside.fragment,
        "sglang/srt/model_executor/piecewise_cuda_graph_runner.py": "class PiecewiseCudaGraphRunner: ...\n",
    }
    for path, text in source.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text if own_operator or "Piecewise" in text else "")
    found = judged("fp4_custom_op", "0.0.0.dev1+gbfefdc52d", roots=(tmp_path,))
    assert found[DENSE][0] == found["flashinfer:fp4_quantize"][0] == verdict
    assert found["flashinfer:block_scale_interleave"][0] == READY


def test_the_reason_names_the_modules_of_the_version() -> None:
    def reason(sglang: str) -> str:
        env = Environment({"sglang": sglang, "flashinfer-python": FLASHINFER[sglang]})
        manager = PluginManager()
        manager.load(["fp4_custom_op"])
        return next(patch.reason for _, patch in manager.patches(env))

    assert "traced: modelopt_quant, compressed_tensors_w4a4_nvfp4; " in reason("0.5.9")
    assert "traced: deepseek_v2" in reason("0.5.13")
    assert "modelopt_quant" not in reason("0.5.13")
    assert "PyTorch reference" not in reason("0.5.9")


def test_choosing_the_reference_is_said_in_the_reason(monkeypatch) -> None:
    monkeypatch.setenv("GLM5_FP4_CUSTOM_OP_REFERENCE", "1")
    manager = PluginManager()
    manager.load(["fp4_custom_op"])
    patches = manager.patches(Environment({"sglang": "0.5.9", "flashinfer-python": "0.6.3"}))
    assert all("on CPU the PyTorch reference" in patch.reason for _, patch in patches)


def test_equal_patches_are_equal() -> None:
    """Or a second registration would wrap twice: case 6 of the field."""
    env = Environment({"sglang": "0.5.9", "flashinfer-python": "0.6.3"})
    manager = PluginManager()
    manager.load(["fp4_custom_op"])
    assert manager.patches(env) == manager.patches(env)


def test_sglangs_stash_and_flashinfers_own_modules_are_kept() -> None:
    for raw in RAW:
        assert STASH in raw.keep
        assert f"flashinfer.quantization.fp4_quantization:{raw.function}" in raw.keep


def test_a_graph_break_needs_no_fullgraph() -> None:
    """Case 2 of the field."""
    with pytest.raises(ConfigurationError) as caught:
        PluginManager().load(["fp4_graph_break"])
    assert str(caught.value).splitlines() == [
        "The plugin 'fp4_graph_break' needs 'no_fullgraph', which is not requested.",
        "  Set GLM5_PLUGINS=fp4_graph_break,no_fullgraph",
    ]


def test_a_graph_break_and_the_operator_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="'fp4_graph_break' and 'fp4_custom_op' exclude each other"):
        PluginManager().load(["fp4_custom_op", "fp4_graph_break", "no_fullgraph"])


def test_a_graph_break_has_the_window_of_the_raw_call() -> None:
    assert judged("fp4_graph_break", "0.5.11")["flashinfer:fp4_quantize"][0] == READY
    assert judged("fp4_graph_break", "0.5.14")["flashinfer:fp4_quantize"][0] == NOT_NEEDED
