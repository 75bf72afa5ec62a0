"""A third-party distribution of plugins for real servers, as a folder to put on PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

PLUGINS = {
    "probe": '''
        """Wraps functions, methods, async methods and a constant that a start and a request surely use."""
        from glm5_plugins import Kind, Patch, Stage, hookimpl
        def same(old):
            def new(*args, **kwargs): return old(*args, **kwargs)
            return new
        def same_async(old):
            async def new(*args, **kwargs): return await old(*args, **kwargs)
            return new
        @hookimpl
        def glm5_patches():
            yield Patch("sglang.srt.model_executor.model_runner:ModelRunner.load_model", same, "a method",
                        must_fire_by=None)
            yield Patch("sglang.srt.utils.common:set_random_seed", same, "a function with from-imports")
            yield Patch("sglang.srt.managers.tokenizer_manager:TokenizerManager._tokenize_one_request", same_async,
                        "an async method")
            yield Patch("sglang.srt.managers.scheduler:TEST_RETRACT_INTERVAL", 3, "a module constant",
                        kind=Kind.REPLACE)
        @hookimpl(wrapper=True)
        def glm5_startup(server_args):
            result = yield
            return result
        @hookimpl(wrapper=True)
        def glm5_graph_capture(model_runner, kind):
            result = yield
            return result
    ''',
    "launch_reader": '''
        """Reads what fp4_warmup would read on an SM120 GPU."""
        from glm5_plugins import Environment, hookimpl
        @hookimpl(wrapper=True)
        def glm5_model_load(model_runner):
            result = yield
            from glm5_plugins.warmup.launches import of_server
            read = of_server(model_runner, (12, 0), Environment())
            print(f"launch read: {read}\\n", end="", flush=True)  # in one write: other processes share the log
            return result
    ''',
    "expert_counter": '''
        """Says how many experts this rank holds, as SGLang's layers have it."""
        from glm5_plugins import hookimpl
        @hookimpl(wrapper=True)
        def glm5_model_load(model_runner):
            result = yield
            from torch.distributed import get_rank
            for name, layer in model_runner.model.named_modules():
                if hasattr(layer, "num_local_experts"):
                    print(f"rank {get_rank()}: {layer.num_local_experts} of {layer.num_experts} experts "
                          f"in {name}, weights {layer.w2_weight.shape[0]}\\n", end="", flush=True)
            return result
    ''',
    "chooser": '''
        """Chooses server arguments."""
        from glm5_plugins import hookimpl
        @hookimpl
        def glm5_server_args(given):
            return {"chunked_prefill_size": 512, "random_seed": 77, "stream_interval": 3}
    ''',
    "drifted": '''
        """Wants a function that no SGLang has."""
        from glm5_plugins import Patch, hookimpl
        @hookimpl
        def glm5_patches():
            yield Patch("sglang.srt.model_executor.model_runner:ModelRunner.load_weights_fast", lambda old: old,
                        "it is not there", requires="sglang>=0.5.8")
    ''',
    "dead": '''
        """Hooks ServerArgs.__post_init__, which is called up to SGLang 0.5.19 and silently ignored later."""
        from glm5_plugins import Patch, Stage, hookimpl
        def same(old):
            def new(self): return old(self)
            return new
        @hookimpl
        def glm5_patches():
            yield Patch("sglang.srt.server_args:ServerArgs.__post_init__", same, "to see it called",
                        must_fire_by=Stage.ARGUMENTS)
    ''',
    "uneven": '''
        """Has another verdict in the rank that comes second: whoever makes a file first is in force."""
        import os
        from glm5_plugins import NotApplicable, Patch, hookimpl
        def first_come(env):
            def wrap(old):
                if env.role.value == "scheduler":
                    try: os.close(os.open(os.environ["FIELD_LOCK"], os.O_CREAT | os.O_EXCL))
                    except FileExistsError: raise NotApplicable("another rank was first") from None
                def new(*args, **kwargs): return old(*args, **kwargs)
                return new
            return wrap
        @hookimpl
        def glm5_patches(env):
            yield Patch("sglang.srt.model_executor.model_runner:ModelRunner.load_model", first_come(env), "one only")
    ''',
    "own_variables": '''
        """Starts the scheduler of rank 1 with variables of its own: those that FIELD_RANK_1 holds as JSON."""
        import inspect, json, os
        from multiprocessing.process import BaseProcess
        from unittest import mock
        from glm5_plugins import hookimpl
        def rank_of(process):
            if not hasattr(process, "_target") or process._target is None: return None
            given = inspect.signature(process._target).bind(*process._args, **process._kwargs).arguments
            return given.get("tp_rank")
        @hookimpl(wrapper=True)
        def glm5_startup():
            start = BaseProcess.start
            def start_otherwise(self):
                own = json.loads(os.environ["FIELD_RANK_1"]) if rank_of(self) == 1 else {}
                with mock.patch.dict(os.environ, own): return start(self)
            with mock.patch.object(BaseProcess, "start", start_otherwise):
                return (yield)
    ''',
    "tiny_module": '''
        """Lets fp4_warmup take this CPU for an SM120 GPU, and a launch for one that uses a single small C++ module.

        Made up are the GPU and the list of modules. What reads the launch, locks, builds and loads is real: the plugin,
        its builder, FlashInfer's JIT, ninja and the compiler.
        """
        from unittest import mock
        from glm5_plugins import hookimpl
        from glm5_plugins.environment import Environment
        from glm5_plugins.plugins import fp4_warmup
        @hookimpl(wrapper=True)
        def glm5_model_load():
            Environment.cuda_devices = property(lambda env: 1)
            if not hasattr(fp4_warmup._warm_up, "real"): fp4_warmup._warm_up = pretend(fp4_warmup._warm_up)
            return (yield)
        def pretend(real):
            def warm_up(*args):
                import torch
                from glm5_plugins.warmup import needs, specs
                modules = {needs.Module("tiny", "tinykernels:get_tiny_module", ("120",)): "a test"}
                with (
                    mock.patch.object(torch.cuda, "get_device_capability", lambda *device: (12, 0)),
                    mock.patch.object(torch.version, "cuda", None),
                    mock.patch.object(needs, "modules_for", lambda launch, env: modules),
                ):
                    specs.assume_cuda_build()
                    return real(*args)
            warm_up.real = real
            return warm_up
    ''',
    "half": '''
        """Cannot be applied in the detokenizer, where alone it fails."""
        from glm5_plugins import Patch, hookimpl
        def wrap(env):
            def same(old):
                if env.is_child: raise ValueError("not in this process")
                return lambda *args, **kwargs: old(*args, **kwargs)
            return same
        @hookimpl
        def glm5_patches(env):
            yield Patch("sglang.srt.managers.detokenizer_manager:DetokenizerManager.event_loop", wrap(env), "to fail")
    ''',
    "pauses": '''
        """Stops at the step that FIELD_PAUSE names, until somebody ends the process."""
        import os, time
        from glm5_plugins import hookimpl
        def pause(step):
            if os.environ.get("FIELD_PAUSE") == step:
                print(f"paused in {step}\\n", end="", flush=True)
                time.sleep(600)
        @hookimpl(wrapper=True)
        def glm5_startup():
            pause("startup")
            return (yield)
        @hookimpl(wrapper=True)
        def glm5_model_load():
            pause("model load")
            return (yield)
        @hookimpl(wrapper=True)
        def glm5_graph_capture():
            pause("capture")
            return (yield)
    ''',
    "raises": '''
        """Raises while the model loads."""
        from glm5_plugins import hookimpl
        @hookimpl(wrapper=True)
        def glm5_model_load(model_runner):
            yield
            raise RuntimeError("the probe lost its thread")
    ''',
}


def write(folder: Path, version: str = "1.0") -> Path:
    """Write the distribution below `folder` and return it."""
    import textwrap

    info = write_metadata(folder, "field-plugins", version)
    points = "".join(f"{name} = field_plugins.{name}\n" for name in PLUGINS)
    (info / "entry_points.txt").write_text(f"[glm5_plugins]\n{points}")
    package = folder / "field_plugins"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, source in PLUGINS.items():
        (package / f"{name}.py").write_text(textwrap.dedent(source))
    return folder


def write_metadata(folder: Path, name: str, version: str) -> Path:
    """Write what says which version of a distribution is installed below `folder`; return where it is."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA.format(name=name, version=version))
    return info
