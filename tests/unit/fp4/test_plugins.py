"""`fp4_custom_op` and `fp4_graph_break` applied to a made-up FlashInfer and SGLang, each time in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FLASHINFER = """
    __version__ = "0.6.3"
    from .fp4_quantization import *
"""
RAW = """
    import functools, subprocess
    def fp4_quantize(
        input, global_scale=None, sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=True,
        is_sf_8x4_layout=False, enable_pdl=None,
    ):
        return get_fp4_quantization_module("120")(input)
    @functools.cache
    def get_fp4_quantization_module(backend):
        subprocess.check_output(["true"])
        return lambda input: (input, input)
    def block_scale_interleave(unswizzled_sf): return unswizzled_sf
    def scaled_fp4_grouped_quantize(a, mask, a_global_sf): return a, a
    def silu_and_mul_scaled_nvfp4_experts_quantize(a, mask, a_global_sf): return a, a
    nvfp4_block_scale_interleave = block_scale_interleave
"""
MODELOPT = {
    "SM120": "from flashinfer import fp4_quantize",
    "SM100": "from sgl_kernel import scaled_fp4_quant as fp4_quantize",
    "CPU": "fp4_quantize = None",
}
COMPRESSED = "from sglang.srt.layers.quantization.modelopt_quant import fp4_quantize"
STANDARD = """
    from flashinfer import fp4_quantize as fp4_quantize_flashinfer
    def dispatch(scales):
        from flashinfer import nvfp4_block_scale_interleave
        return nvfp4_block_scale_interleave
"""
MODELOPT_MODULE = "sglang.srt.layers.quantization.modelopt_quant"
COMPRESSED_MODULE = f"{MODELOPT_MODULE.rpartition('.')[0]}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4"
STANDARD_MODULE = "sglang.srt.layers.moe.token_dispatcher.standard"

PRELUDE = f"""
    import json, os, sys
    from glm5_plugins.environment import Environment
    from glm5_plugins.manager import PluginManager
    from glm5_plugins.patching import Registry
    manager, env = PluginManager(), Environment({{"sglang": "0.5.11", "flashinfer-python": "0.6.3"}})
    registry = Registry(env)
    def apply(*plugins):
        manager.load(plugins)
        for plugin, patch in manager.patches(env):
            registry.add(plugin.name, patch)
    def imported():
        import {MODELOPT_MODULE} as dense, {COMPRESSED_MODULE} as compressed, {STANDARD_MODULE} as standard
        return dense, compressed, standard
    def rows():
        found = {{}}
        for record in registry:
            found[record.patch.target.rpartition(".")[2]] = [record.verdict.value, record.reason, record.fired]
        return found
"""

Process = Callable[..., Any]


@pytest.fixture
def process(tmp_path: Path) -> Process:
    """Run code after PRELUDE on a machine with this GPU, and return what it prints as JSON."""

    def run(code: str, gpu: str = "SM120", **env: str) -> Any:
        files = {
            "flashinfer/__init__.py": FLASHINFER,
            "flashinfer/fp4_quantization.py": RAW,
            "sgl_kernel.py": "def scaled_fp4_quant(input, scale): return input, scale",
            MODELOPT_MODULE.replace(".", "/") + ".py": MODELOPT[gpu],
            COMPRESSED_MODULE.replace(".", "/") + ".py": COMPRESSED,
            STANDARD_MODULE.replace(".", "/") + ".py": STANDARD,
        }
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": str(tmp_path), **env},
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("early", [True, False])
def test_every_binding_holds_the_operator_and_restoring_leaves_no_trace(process: Process, early: bool) -> None:
    """Case 6 of the field: apply, restore, apply again."""
    found = process(
        f"""
        import flashinfer.fp4_quantization as home
        raw, raw_interleave = home.fp4_quantize, home.block_scale_interleave
        if not {early}:
            imported()
        else:
            for name in [name for name in sys.modules if name.startswith("flashinfer")]:
                del sys.modules[name]
        held = []
        for time in range(2):
            apply("fp4_custom_op")
            dense, compressed, standard = imported()
            import flashinfer
            registry.verify()
            first = rows()
            bindings = [dense.fp4_quantize, compressed.fp4_quantize, standard.fp4_quantize_flashinfer]
            bindings += [flashinfer.fp4_quantize]
            held.append(len({{id(one) for one in bindings}}))
            held.append(bindings[0].__module__)
            held.append(standard.dispatch(None) is flashinfer.block_scale_interleave)
            held.append(standard.dispatch(None).__module__)
            held.append(sys.modules["flashinfer.fp4_quantization"].fp4_quantize.__module__)
            registry.restore()
            manager = PluginManager()
            held.append(sorted({{one.__module__ for one in (dense.fp4_quantize, compressed.fp4_quantize,
                standard.fp4_quantize_flashinfer, flashinfer.fp4_quantize, standard.dispatch(None))}}))
        print(json.dumps([held, first]))
        """
    )
    operator, raw = "glm5_plugins.fp4.operator", "flashinfer.fp4_quantization"
    assert found[0] == [1, operator, True, operator, raw, [raw]] * 2
    rows = found[1]
    for target in ("flashinfer:fp4_quantize", "modelopt_quant:fp4_quantize", "flashinfer:block_scale_interleave"):
        assert rows[target][0] == "applied", rows[target]
    assert rows["flashinfer:nvfp4_kv_quantize"][0] == "not applicable"


@pytest.mark.parametrize(("gpu", "held"), [("SM100", "sgl_kernel.scaled_fp4_quant"), ("CPU", "None")])
def test_dense_layers_with_another_kernel_are_not_applicable(process: Process, gpu: str, held: str) -> None:
    rows = process('apply("fp4_custom_op"); imported(); registry.verify(); print(json.dumps(rows()))', gpu)
    assert rows["modelopt_quant:fp4_quantize"] == [
        "not applicable",
        f"dense layers hold {held} here, which is not FlashInfer's; they hold that on SM120 only",
        0,
    ]
    assert rows["flashinfer:fp4_quantize"][0] == "applied"


def test_the_name_is_taken(process: Process) -> None:
    """Case 3 of the field."""
    rows = process(
        """
        import torch
        theirs = torch.library.Library("glm5", "FRAGMENT")
        theirs.define("fp4_quantize(Tensor input) -> Tensor")
        apply("fp4_custom_op")
        dense, *_ = imported()
        assert dense.fp4_quantize.__module__ == "flashinfer.fp4_quantization"
        print(json.dumps(rows()))
        """
    )
    verdict, reason, _ = rows["flashinfer:fp4_quantize"]
    assert verdict == "failed"
    assert reason.startswith("OperatorConflict: the torch operator glm5::fp4_quantize is already registered by ")


COMPILE = """
    import torch
    dense, *_ = imported()
    def layer(x):
        packed, scales = dense.fp4_quantize(x * 2, torch.ones(1))
        return packed, scales
    def outcome(fullgraph):
        torch._dynamo.reset()
        try:
            torch.compile(layer, backend="eager", fullgraph=fullgraph)(torch.ones(4, 64, dtype=torch.bfloat16))
        except torch._dynamo.exc.Unsupported as error:
            return str(error).splitlines()[0]
        return "traces"
"""


def test_a_loader_that_shells_out_and_its_two_cures(process: Process) -> None:
    """Cases 1 and 2 of the field."""
    found = process(
        textwrap.dedent(COMPILE)
        + textwrap.dedent(
            """
            layer(torch.ones(4, 64))  # warmed up
            said = [outcome(True)]
            apply("fp4_graph_break", "no_fullgraph")
            said += [outcome(True), outcome(False)]
            registry.restore()
            manager = PluginManager()
            apply("fp4_custom_op")
            said += [outcome(True), rows()["flashinfer:fp4_quantize"][2]]
            print(json.dumps(said))
            """
        ),
        GLM5_FP4_CUSTOM_OP_REFERENCE="1",
    )
    assert found == [
        "Attempted to call function marked as skipped",
        "Skip calling `torch.compiler.disable()`d function",
        "traces",
        "traces",
        1,
    ]


def test_on_the_cpu_the_operator_refuses_unless_the_reference_is_chosen(process: Process) -> None:
    code = """
        import torch
        apply("fp4_custom_op")
        dense, *_ = imported()
        try:
            packed, scales = dense.fp4_quantize(torch.ones(ROWS, 64, dtype=torch.bfloat16), torch.ones(1))
            print(json.dumps([list(packed.shape), list(scales.shape)]))
        except NotImplementedError as error:
            print(json.dumps(str(error)))
    """
    refused = process(code.replace("ROWS", "4"))
    assert "glm5::fp4_quantize was called with CPU tensors; flashinfer:fp4_quantize runs on CUDA only." in refused
    assert "GLM5_FP4_CUSTOM_OP_REFERENCE=1" in refused
    chosen = {"GLM5_FP4_CUSTOM_OP_REFERENCE": "true"}
    assert process(code.replace("ROWS", "4"), **chosen) == [[4, 32], [128, 4]]
    # Case 13 of the field: an empty batch.
    assert process(code.replace("ROWS", "0"), **chosen) == [[0, 32], [0, 4]]
