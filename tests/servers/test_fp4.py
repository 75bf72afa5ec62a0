"""The FP4 plugins on real SGLang and FlashInfer, told that the device is an SM120; and the command that proves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.fp4_server import DENSE, write_plugin
from tests.servers.conftest import StartServer
from tests.support.server import STANDINS, cpu_environment

RAW_DENSE = pytest.mark.sglang("<0.5.12", reason="from 0.5.12 SGLang has its own operator")
OWN_OPERATOR = pytest.mark.sglang(">=0.5.12", reason="before 0.5.12 SGLang had no operator of its own")

BINDINGS = """
    import importlib, json, sys
    import sglang.srt.utils.common as common
    if hasattr(common, "is_sm120_supported"):
        common.is_sm120_supported = lambda device=None: SM120
    from glm5_plugins.environment import Environment
    from glm5_plugins.manager import PluginManager
    from glm5_plugins.patching import Registry
    env, manager = Environment(), PluginManager()
    registry = Registry(env)
    def apply():
        manager.load(["fp4_custom_op"])
        for plugin, patch in manager.patches(env):
            registry.add(plugin.name, patch)
    if EARLY:
        apply()
    names = (
        "quantization.modelopt_quant:fp4_quantize",
        "quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4:fp4_quantize",
        "moe.token_dispatcher.standard:fp4_quantize_flashinfer",
        "moe.token_dispatcher.flashinfer:fp4_quantize",
        "moe.token_dispatcher.flashinfer:nvfp4_block_scale_interleave",
        "quantization.fp4_utils:_flashinfer_fp4_quantize",
    )
    held = {}
    for name in names:
        module, _, attribute = name.partition(":")
        held[name] = importlib.import_module("sglang.srt.layers." + module)
    import flashinfer
    if not EARLY:
        apply()
    registry.verify()
    found = {}
    for name, module in held.items():
        value = getattr(module, name.partition(":")[2], None)
        found[name] = getattr(value, "__module__", None)
    for function in ("fp4_quantize", "block_scale_interleave", "nvfp4_block_scale_interleave"):
        found["flashinfer:" + function] = getattr(flashinfer, function).__module__
    own = importlib.import_module("flashinfer.fp4_quantization")  # from 0.6.7 on a module of re-exports
    found["FlashInfer's own"] = own.fp4_quantize.__module__
    rows = {record.patch.target: [record.verdict.value, record.reason] for record in registry}
    registry.restore()
    left = [name for name, module in held.items() if "glm5" in str(getattr(module, name.partition(":")[2], None))]
    print(json.dumps([found, rows, left]))
"""
OPERATOR = "glm5_plugins.fp4.operator"


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GLM5_")}
    return {**inherited, **cpu_environment(Path(sys.executable)), **more}


def bindings(early: bool, sm120: bool = True) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The module that each binding's function is from, and the verdicts."""
    code = textwrap.dedent(BINDINGS).replace("EARLY", str(early)).replace("SM120", str(sm120))
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found, rows, left = json.loads(done.stdout.strip().splitlines()[-1])
    assert left == []
    return found, rows


@RAW_DENSE
@pytest.mark.parametrize("early", [True, False])
def test_every_binding_of_sm120_is_the_operator(early: bool) -> None:
    found, rows = bindings(early)
    assert {verdict for verdict, _ in rows.values()} <= {"applied", "not applicable"}, rows
    assert rows[DENSE][0] == rows["flashinfer:fp4_quantize"][0] == "applied"
    own = found.pop("FlashInfer's own")
    assert own in ("flashinfer.fp4_quantization", "flashinfer.quantization.fp4_quantization")
    assert found.pop("quantization.fp4_utils:_flashinfer_fp4_quantize") is None
    assert found == dict.fromkeys(found, OPERATOR)


@RAW_DENSE
def test_on_other_gpus_dense_layers_are_not_applicable() -> None:
    _, rows = bindings(early=True, sm120=False)
    verdict, reason = rows[DENSE]
    assert verdict == "not applicable"
    assert reason.endswith("here, which is not FlashInfer's; they hold that on SM120 only")


@OWN_OPERATOR
@pytest.mark.parametrize("early", [True, False])
def test_sglangs_own_operator_keeps_what_it_calls(early: bool) -> None:
    found, rows = bindings(early)
    assert rows[DENSE][0] == "not needed"
    assert {verdict for verdict, _ in rows.values()} <= {"applied", "not needed", "not applicable"}, rows
    assert found["quantization.fp4_utils:_flashinfer_fp4_quantize"].startswith("flashinfer.")
    assert OPERATOR not in {
        found[name] for name in found if name.endswith(":fp4_quantize") and "flashinfer:" not in name
    }


def trace(plugins: str) -> tuple[int, dict[str, Any]]:
    """What `glm5-plugins trace --json` says, and its exit status."""
    argv = [sys.executable, "-m", "glm5_plugins.cli", "trace", "--json"]
    done = subprocess.run(argv, env=environment(GLM5_PLUGINS=plugins), capture_output=True, text=True, timeout=580)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@RAW_DENSE
def test_trace_shows_the_failure_and_the_cure() -> None:
    """Case 1 of the field."""
    status, said = trace("")
    raw, cured = said["attempts"]
    assert (status, said["traces"], said["cure"]) == (1, False, ["fp4_custom_op"])
    assert raw["outcome"] == "stops"
    assert raw["error"].startswith("Attempted to call function marked as skipped")
    files = [frame["file"].rpartition("/")[2] for frame in raw["frames"]]
    assert files[0] == "fp4_quantization.py"
    assert files[-1] == "subprocess.py"
    assert [frame["function"] for frame in raw["frames"]].count("get_cuda_path") == 1
    assert (cured["outcome"], cured["operators"]) == ("traces", ["glm5::fp4_quantize"])


@RAW_DENSE
def test_trace_with_the_plugin_is_fine() -> None:
    status, said = trace("fp4_custom_op")
    assert (status, said["traces"], said["cure"]) == (0, True, None)
    assert [attempt["outcome"] for attempt in said["attempts"]] == ["stops", "traces"]
    assert any(row.startswith("fp4_custom_op: applied") and DENSE in row for row in said["attempts"][1]["rows"])


@RAW_DENSE
def test_trace_of_a_graph_break_with_and_without_what_it_needs() -> None:
    """Case 2 of the field."""
    status, said = trace("fp4_graph_break")
    assert (status, said["cure"]) == (1, ["fp4_custom_op"])
    assert said["attempts"][1]["outcome"] == "refused"
    assert "needs 'no_fullgraph'" in said["attempts"][1]["error"]
    status, said = trace("no_fullgraph,fp4_graph_break")
    assert (status, said["attempts"][1]["outcome"]) == (0, "breaks")


@OWN_OPERATOR
def test_trace_of_sglangs_own_operator_needs_no_plugin() -> None:
    status, said = trace("")
    assert (status, said["traces"], said["cure"]) == (0, True, None)
    assert [attempt["operators"] for attempt in said["attempts"]] == [["sglang::flashinfer_fp4_quantize"]]


@pytest.mark.sglang(">=0.5.11,<0.5.12", reason="one version is enough for a server with an FP4 call in every MLP")
def test_a_server_with_an_fp4_call_in_every_mlp(start_server: StartServer, tmp_path: Path) -> None:
    path = {"PYTHONPATH": f"{STANDINS}{os.pathsep}{write_plugin(tmp_path)}"}
    with start_server(args=["--random-seed", "1"]) as plain:
        expected = plain.generate("the same", max_new_tokens=8)["output_ids"]
    chosen = {"GLM5_FP4_CUSTOM_OP_REFERENCE": "1", **path}
    with start_server(plugins=["fp4_custom_op"], env=chosen, args=["--random-seed", "1"]) as server:
        assert server.generate("the same", max_new_tokens=8)["output_ids"] == expected
        assert "and on CPU the PyTorch reference" in server.log_text()
