"""Put launches to plugins, and what the plugins made of them to SGLang's own resolution, in one process.

    python -m tests.servers.resolving < launches.json

Run by `test_resolver.py`. For each launch a fork of this process goes the way that a server's main process goes:
SGLang's parser, with the flags that plugins add; `ServerArgs`, resolved; then, as a scheduler does before it loads a
model, the MoE and FP4 GEMM configuration. No kernel runs and nothing listens.

Stood in is the machine, and nothing of SGLang: `torch.cuda` says that there are as many GPUs as asked for, of the
compute capability asked for and 96 GB each, `torch.version.cuda` says 13.0, and a command `nvidia-smi` says the same.
The kernels of `sgl_kernel` are stood in as on the CPU servers, so the fake implementations that SGLang registers for
them have nothing to be registered for. A transformers older than GLM-5 is told the model type, for whose users
upgraded it.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

import torch

capability = (0, 0)
gpus = 8


def stand_in() -> None:
    """Make a machine with GPUs of this one; before SGLang is imported."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: gpus
    cuda.get_device_capability = lambda device=None: capability
    cuda.get_device_name = lambda device=None: "a GPU that is not there"
    cuda.mem_get_info = lambda device=None: (95 << 30, 96 << 30)
    version: Any = torch.version
    version.cuda = "13.0"
    library: Any = torch.library
    library.register_fake = _except_for_stood_in_kernels(library.register_fake)


def _except_for_stood_in_kernels(register: Callable[..., Any]) -> Callable[..., Any]:
    def register_fake(operator: Any, function: Any = None, **more: Any) -> Any:
        if str(operator).startswith("sgl_kernel::"):
            return function if function is not None else lambda function: function
        return register(operator, function, **more)

    return register_fake


def tell_the_model_type(name: str) -> None:
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        AutoConfig.register(name, type("Config", (PretrainedConfig,), {"model_type": name}))


def answer(launch: Mapping[str, Any]) -> dict[str, Any]:
    """What the plugins and then SGLang make of a launch.

    Args:
        launch: `capability`; `argv`; `plugins`, `env` (their options) and `profile`; `typed`, what a user would type
            in place of a plugin that refuses; `ask`, fields to read from what SGLang resolved.
    """
    from sglang.srt.server_args import ServerArgs

    from glm5_plugins import arguments

    found: dict[str, Any] = {"given": None, "added": None, "refused": "", "said": "", "error": ""}
    os.environ.update(launch["env"])
    make_parser = ServerArgs.add_cli_args

    def add_cli_args(parser: Any) -> None:
        make_parser(parser)
        arguments.add_where_absent(parser, lambda given: _additions(launch, given, found))

    server_args: Any = ServerArgs
    server_args.add_cli_args = staticmethod(add_cli_args)
    try:
        args = _parsed(launch["argv"])
        if found["refused"]:
            server_args.add_cli_args = staticmethod(make_parser)
            args = _parsed([*launch["argv"], *launch["typed"]])
        found |= _resolved(args, {*launch["ask"], *(found["added"] or ())})
    except Exception as error:  # SGLang's own refusal: what is asked for
        found["error"] = f"{type(error).__name__}: {error}"
    except SystemExit as error:
        found["error"] = f"SystemExit: {error}"
    return found


def _additions(launch: Mapping[str, Any], given: Mapping[str, Any], found: dict[str, Any]) -> Mapping[str, Any]:
    from glm5_plugins.settings import profile as profiles

    from glm5_plugins import Environment
    from glm5_plugins.errors import Glm5Error
    from glm5_plugins.manager import PluginManager
    from glm5_plugins.preset import Preset
    from glm5_plugins.rules import Launch

    env = Environment({"sglang": metadata.version("sglang")}, capability, elsewhere=True)
    complete, plugins = dict(given), launch["plugins"]
    try:
        if launch["profile"]:
            preset = Preset(profiles.load(launch["profile"]), env)
            preset.take_effect_on_settings()
            complete, plugins = preset.complete(given), preset.profile.plugins
            preset.set_variables(Launch(env, complete))
        manager = PluginManager()
        manager.load(plugins)
        added = {name: value for name, (_, value) in manager.server_args(env, complete).items()}
        if launch["profile"]:
            preset.judge({**complete, **added})
            added = {**preset.added, **added}
        outcomes = [manager.outcome(plugin, env) for plugin in manager.plugins]
        found["said"] = "; ".join(f"{one.verdict.value}: {one.reason}" for one in outcomes if one is not None)
    except Glm5Error as error:
        found["refused"] = str(error)
        return {}
    seen = Launch(env, {**complete, **added})
    found |= {"given": dict(given), "added": added, "runner": seen.runner, "fp4_gemm": seen.fp4_gemm}
    return added


def _parsed(argv: list[str]) -> Any:
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(argv)


def _resolved(args: Any, fields: set[str]) -> dict[str, Any]:
    """The values that SGLang goes by, and what the processes of its ranks make of them."""
    from glm5_plugins import seams

    if hasattr(args, "resolve_once"):  # before, `ServerArgs` resolves itself
        args.resolve_once()
    resolved = seams._resolved(args, fields | {"moe_runner_backend"})
    moe, fp4 = (import_module(f"sglang.srt.layers.{name}") for name in ("moe.utils", "quantization.fp4_utils"))
    published = not inspect.signature(moe.initialize_moe_config).parameters
    if published:
        import_module("sglang.srt.runtime_context").publish(args, role="scheduler")
    for initialize in (moe.initialize_moe_config, fp4.initialize_fp4_gemm_config):
        initialize() if published else initialize(args)
    overlap = import_module("sglang.srt.batch_overlap.single_batch_overlap").SboFlags
    mscclpp = import_module("sglang.srt.distributed.device_communicators.pymscclpp")
    sizes = getattr(mscclpp, "_SUPPORTED_WORLD_SIZES", None)  # of the class, before 0.5.21
    return {
        "mscclpp_sizes": list(sizes or mscclpp.PyMscclppCommunicator._SUPPORTED_WORLD_SIZES),
        "resolved": resolved,
        "runner_here": moe.get_moe_runner_backend().value,
        "fp4_gemm_here": fp4.get_fp4_gemm_runner_backend().value,
        "overlaps": overlap.enable_combine_down_gemm_two_stream_overlap(),
    }


def in_a_fork(function: Callable[[], Any]) -> Callable[[], Any]:
    """Call a function in a process of its own, and return what waits for its result."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reading)
        status = 1
        try:
            with os.fdopen(writing, "w") as pipe:
                json.dump(function(), pipe, default=str)
            status = 0
        finally:
            if status:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
    os.close(writing)

    def wait() -> Any:
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        return json.loads(text)

    return wait


def answers(launches: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Answer for launches on one kind of GPU, each in a process of its own.

    SGLang keeps what it has seen of the machine in caches and module globals, and what it decided in the environment.
    """
    global capability
    capability = tuple(launches[0]["capability"])
    stand_in()
    for name in ("server_args", "layers.moe.utils", "layers.quantization.fp4_utils"):
        import_module(f"sglang.srt.{name}")
    import_module("sglang.srt.batch_overlap.single_batch_overlap")
    tell_the_model_type("glm_moe_dsa")
    return [in_a_fork(functools.partial(answer, launch))() for launch in launches]


def main() -> int:
    launches = json.load(sys.stdin)
    by_gpu: dict[str, list[int]] = {}
    for index, launch in enumerate(launches):
        by_gpu.setdefault(str(launch["capability"]), []).append(index)
    import_module("transformers")  # the greatest part of what SGLang imports, and the same on any GPU
    waiting = [
        (group, in_a_fork(functools.partial(answers, [launches[index] for index in group])))
        for group in by_gpu.values()
    ]
    found = {index: one for group, wait in waiting for index, one in zip(group, wait(), strict=True)}
    print("ANSWERS" + json.dumps([found[index] for index in range(len(launches))]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
