"""A third-party distribution of plugins for real servers, as a folder to put on PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: field-plugins\nVersion: 1.0\n"

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
            print("launch read:", of_server(model_runner, (12, 0), Environment()), flush=True)
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
    "raises": '''
        """Raises while the model loads."""
        from glm5_plugins import hookimpl
        @hookimpl(wrapper=True)
        def glm5_model_load(model_runner):
            yield
            raise RuntimeError("the probe lost its thread")
    ''',
}


def write(folder: Path) -> Path:
    """Write the distribution below `folder` and return it."""
    import textwrap

    info = folder / "field_plugins-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    points = "".join(f"{name} = field_plugins.{name}\n" for name in PLUGINS)
    (info / "entry_points.txt").write_text(f"[glm5_plugins]\n{points}")
    package = folder / "field_plugins"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, source in PLUGINS.items():
        (package / f"{name}.py").write_text(textwrap.dedent(source))
    return folder
