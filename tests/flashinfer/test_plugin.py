"""`fp4_custom_op` and `fp4_graph_break` on the installed FlashInfer, each time in a fresh process."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed", exc_type=ImportError)

PRELUDE = """
    import inspect, json, sys, warnings
    import torch, flashinfer
    warnings.simplefilter("ignore")
    from glm5_plugins.environment import Environment
    from glm5_plugins.manager import PluginManager
    from glm5_plugins.patching import Registry
    # FlashInfer asks its loader for an SM120 module, as on that device.
    home = sys.modules[inspect.unwrap(flashinfer.fp4_quantize).__module__]
    torch.version.cuda = "13.0"
    home.get_compute_capability = lambda device: (12, 0)
    home.device_support_pdl = lambda device: False
    env = Environment({"sglang": "0.5.11"})
    manager, registry = PluginManager(), Registry(env)
    def apply(*plugins):
        manager.load(plugins)
        for plugin, patch in manager.patches(env):
            if plugin.name.startswith("fp4"):
                registry.add(plugin.name, patch)
        registry.verify()
        return {record.patch.target: [record.verdict.value, record.reason] for record in registry}
    def layer(x, scale):
        from flashinfer import fp4_quantize
        packed, scales = fp4_quantize(x * 2, scale)
        return packed, scales
    def outcome(fullgraph=True):
        torch._dynamo.reset()
        try:
            torch.compile(layer, backend=backend, fullgraph=fullgraph)(
                torch.ones(4, 128, dtype=torch.bfloat16), torch.ones(1))
        except torch._dynamo.exc.Unsupported as error:
            return str(error).splitlines()[0]
        return "traces"
    def backend(graph, inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes if "fp4" in str(node.target))
        return graph.forward
    nodes = []
"""


def fresh(code: str, **env: str):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(code)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_raw_fails_with_the_plugin_it_traces_and_undone_it_fails_again():
    """Cases 1 and 6 of the field."""
    raw, rows, cured, nodes, again = fresh(
        """
        said = [outcome(), apply("fp4_custom_op"), outcome(), nodes]
        registry.restore()
        print(json.dumps([*said, outcome()]))
        """,
        GLM5_FP4_CUSTOM_OP_REFERENCE="1",
    )
    assert raw == again == "Attempted to call function marked as skipped"
    assert (cured, nodes) == ("traces", ["glm5.fp4_quantize.default"])
    assert rows["flashinfer:fp4_quantize"][0] == "applied", rows
    assert {verdict for verdict, _ in rows.values()} <= {"applied", "waiting", "not applicable"}, rows


def test_flashinfer_itself_keeps_the_raw_function():
    kept = fresh('apply("fp4_custom_op"); print(json.dumps(home.fp4_quantize.__module__))')
    assert kept == flashinfer.fp4_quantize.__module__


def test_a_graph_break_fails_while_fullgraph_stays_and_passes_without():
    """Case 2 of the field."""
    rows, whole, broken = fresh(
        """
        rows = apply("no_fullgraph", "fp4_graph_break")
        whole = outcome()
        def get_fp4_quantization_module(*args):
            raise RuntimeError("the kernel would run now")
        home.get_fp4_quantization_module = get_fp4_quantization_module
        try:
            outcome(fullgraph=False)
        except RuntimeError as error:
            print(json.dumps([rows, whole, str(error)]))
        """
    )
    assert rows["flashinfer:fp4_quantize"][0] == "applied", rows
    assert whole.startswith("Skip calling `torch.compiler.disable()`d function")
    assert broken == "the kernel would run now"
