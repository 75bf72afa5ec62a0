"""FlashInfer's FP4 modules are built once and loaded after the model, before any graph is captured.

Left alone, the first forward pass compiles them with nvcc, in every rank at once, in the middle of capture: minutes of
silence. Here one process of a node builds them and says how far it is, the others wait, and all load them under the
cache keys that the runtime will ask for. It takes the build out of the capture, and the race out of the build; a single
rank that builds a single module is not ready sooner (`benchmarks/warmup_h200.md`). It does not make raw FlashInfer
calls traceable, which `fp4_custom_op` does.

`glm5-plugins warmup` does the same beforehand, on a machine with no GPU.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from glm5_plugins.settings.model import read, split_at_commas
from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from glm5_plugins import Environment, Finding, Outcome, Patch, PluginSettings, Verdict, hookimpl
from glm5_plugins.errors import Glm5Error

logger = logging.getLogger("glm5_plugins")


class Options(PluginSettings, plugin="fp4_warmup"):
    """What can be set."""

    timeout_s: float = Field(1500.0, gt=0)
    """Seconds for all modules, waiting for another process included; torch's gloo gives up after 1800."""
    jobs: int = Field(0, ge=0)
    """Compilers at once; 0 for MAX_JOBS, or as many as processors and memory allow."""
    prebuilt: Path | None = None
    """A folder that `glm5-plugins warmup --out` made; its modules are loaded and never built."""
    modules: Annotated[tuple[str, ...], NoDecode] = ()
    """Modules besides those the launch is known to use, by name, separated by commas: `fp4_quantization`."""

    _split = field_validator("modules", mode="before")(split_at_commas)


_outcome: Outcome | None = None
_loaded: set[Any] = set()


@hookimpl(wrapper=True)
def glm5_model_load(model_runner: Any) -> Generator[None, Any, Any]:
    """Make the modules ready once the weights are loaded, in each process that has a GPU."""
    global _outcome
    result = yield
    env = Environment()
    if env.cuda_devices:
        try:
            _outcome = _warm_up(model_runner, env, read(Options))
        except Glm5Error as error:
            _outcome = Outcome(Verdict.FAILED, error.what, error.mend)
    return result


@hookimpl
def glm5_outcome(env: Environment) -> Outcome | None:
    """Say how many modules are ready, or why none was looked at."""
    if not env.cuda_devices:
        return Outcome(Verdict.NOT_APPLICABLE, "no CUDA device here: no module is built or loaded")
    return _outcome


@hookimpl
def glm5_preflight(env: Environment) -> Iterable[Finding]:
    """Check compiler, headers and cache folder, for the GPUs of this machine."""
    from glm5_plugins.warmup import toolkit

    return toolkit.preflight(env)


@hookimpl
def glm5_patches(env: Environment) -> Iterator[Patch]:
    """Let FlashInfer load a shipped folder of modules where one is given."""
    folder = read(Options).prebuilt
    if folder is not None:
        from glm5_plugins.warmup import bundle

        yield Patch(
            target="flashinfer.jit.core:JitSpec.build_and_load",
            using=bundle.loader(folder, env),
            reason=f"modules are loaded from {folder}",
            requires="flashinfer-python>=0.6.1",
            upstream="flashinfer/jit/core.py, JitSpec.build_and_load",
            fate="delete when FlashInfer takes a folder of built modules by an environment variable",
        )


def _warm_up(model_runner: Any, env: Environment, options: Options) -> Outcome:
    import torch

    from glm5_plugins.warmup import bundle, launches, needs, specs, toolkit
    from glm5_plugins.warmup.building import Builder

    arch = torch.cuda.get_device_capability(model_runner.gpu_id)
    wanted = needs.modules_for(launches.of_server(model_runner, arch, env), env)
    wanted |= needs.modules_named(options.modules, arch, env, "GLM5_FP4_WARMUP_MODULES")
    modules = [module for module in wanted if module not in _loaded]
    if not modules:
        return _outcome or Outcome(Verdict.NOT_NEEDED, "this launch uses no FP4 module that FlashInfer compiles")
    began = time.monotonic()
    os.environ.update(toolkit.Toolkit.here().to_load_with())
    artifacts = [specs.find(module) for module in modules]
    shipped = set(bundle.read(options.prebuilt).modules) if options.prebuilt else set()
    builder = Builder(specs.cache_folder(), _say, timeout_s=options.timeout_s, jobs=options.jobs)
    how = builder.make_ready([artifact for artifact in artifacts if artifact.name not in shipped])
    for artifact in artifacts:
        artifact.load()
        _loaded.add(artifact.module)
    made = ", ".join(f"{artifact.name} ({how.get(artifact.name, 'shipped')})" for artifact in artifacts)
    return Outcome(Verdict.APPLIED, f"ready before capture, in {time.monotonic() - began:.1f} s: {made}")


def _say(text: str) -> None:
    logger.info("glm5-plugins: fp4_warmup: %s", text)
