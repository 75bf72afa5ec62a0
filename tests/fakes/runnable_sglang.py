"""A made-up SGLang that runs: the steps of a start, in the processes that SGLang has, without weights or sockets.

Its functions have the names and parameters of SGLang 0.5.23 (`tests/contracts` holds those against the wheels) and,
with `version="0.5.9"`, of 0.5.9, which has no plugin loader.
"""

from __future__ import annotations

_COMMON = {
    "sglang/__init__.py": "",
    "sglang/srt/utils/common.py": """
        import ctypes, logging, signal
        def die_with_parent():
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        def configure_logger(server_args, prefix=""):
            logging.basicConfig(level=logging.INFO, format=f"[log{prefix}] %(message)s", force=True)
    """,
    "sglang/srt/server_args.py": """
        import argparse
        class ServerArgs:
            def __init__(self, **values):
                self.__dict__.update(values)
            @staticmethod
            def add_cli_args(parser):
                parser.add_argument("--model-path", "--model", required=True)
                parser.add_argument("--tensor-parallel-size", "--tp-size", dest="tp_size", type=int, default=1)
                parser.add_argument("--expert-parallel-size", "--ep-size", dest="ep_size", type=int, default=1)
                parser.add_argument("--enable-mscclpp", action="store_true")
                parser.add_argument("--speculative-algorithm", default=None)
                parser.add_argument("--model-loader-extra-config", default="{}")
                parser.add_argument("--cuda-graph-bs", type=int, nargs="+", default=None)
        def prepare_server_args(argv):
            parser = argparse.ArgumentParser()
            ServerArgs.add_cli_args(parser)
            if "--config" in argv:
                from CONFIG_PARSER import ConfigArgumentMerger
                argv = ConfigArgumentMerger(parser).merge_config_with_args(argv)
            return ServerArgs(**vars(parser.parse_args(argv)))
    """,
    "sglang/srt/managers/detokenizer_manager.py": """
        from sglang.srt.utils.common import configure_logger, die_with_parent
        LOAD
        def run_detokenizer_process(server_args):
            die_with_parent()
            load_plugins()
            configure_logger(server_args, " detokenizer")
    """,
    "sglang/srt/managers/scheduler.py": """
        import os, signal, traceback
        from types import SimpleNamespace
        from sglang.srt.utils.common import configure_logger, die_with_parent
        LOAD
        class Scheduler:
            def __init__(self, server_args):
                from sglang.srt.model_executor.model_runner import ModelRunner
                runner = ModelRunner()
                runner.load_model()
                runner.capture()
            def get_internal_state(self, recv_req): return SimpleNamespace(internal_state={"a": 1})
        def run_scheduler_process(server_args):
            die_with_parent()
            load_plugins()
            configure_logger(server_args, " scheduler")
            try: Scheduler(server_args)
            except Exception:
                traceback.print_exc()
                os.kill(os.getppid(), signal.SIGQUIT)
            else: print("scheduler is ready", flush=True)
    """,
    "sglang/srt/managers/tokenizer_manager.py": """
        class ControlMixin:
            async def get_internal_state(self): return [{"a": 1}]
        class TokenizerManager(ControlMixin): pass
    """,
    "sglang/srt/distributed/parallel_state.py": """
        class GroupCoordinator:
            rank_in_group: int = 0
            world_size: int = 1
            cpu_group: object = None
        def get_world_group(): return GroupCoordinator()
    """,
    "sglang/launch_server.py": """
        import sys
        LOAD
        from sglang.srt.server_args import prepare_server_args
        if __name__ == "__main__":
            load_plugins()
            server_args = prepare_server_args(sys.argv[1:])
            from sglang.srt.entrypoints.http_server import launch_server
            launch_server(server_args)
            print("server is ready with", dict(sorted(vars(server_args).items())), flush=True)
    """,
}
_CONFIG_PARSER = """
    import json
    class ConfigArgumentMerger:
        def __init__(self, parser):
            self.parser = parser
        def merge_config_with_args(self, cli_args):
            at = cli_args.index("--config")
            with open(cli_args[at + 1]) as file:
                config = json.load(file)  # JSON is YAML too
            return self._convert_config_to_args(config) + cli_args[:at] + cli_args[at + 2:]
        def _convert_config_to_args(self, config):
            found = []
            for key, value in config.items():
                if value is True:
                    found.append("--" + key)
                elif value is not False:
                    found += ["--" + key, str(value)]
            return found
"""
_ENGINE = """
    import multiprocessing as mp, os, signal, sys
    from sglang.srt.utils.common import configure_logger
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
    from sglang.srt.server_args import ServerArgs
    def end_with(children, why):
        for child in children: child.kill()
        print(why, file=sys.stderr, flush=True)
        os._exit(1)
    def launch(server_args):
        configure_logger(server_args)
        signal.signal(signal.SIGQUIT, lambda number, frame: end_with(children, "a child failed"))
        context = mp.get_context("spawn")
        children = [context.Process(target=target, args=(server_args,))
                    for target in (run_scheduler_process, run_detokenizer_process)]
        for child in children: child.start()
        try:
            for child in children: child.join()
        except KeyboardInterrupt:
            end_with(children, "interrupted")
        # As SGLang up to 0.5.9 does: it hears of the end of schedulers, and of others only what they tell it.
        if children[0].exitcode:
            raise SystemExit("the scheduler ended with " + str(children[0].exitcode))
"""
_NEW = {
    "sglang/srt/utils/server_args_config_parser.py": _CONFIG_PARSER,
    "sglang/srt/plugins/__init__.py": """
        import logging, os
        from importlib.metadata import entry_points
        _loaded = False
        def load_plugins():
            global _loaded
            if _loaded: return
            _loaded = True
            allowed = os.environ.get("SGLANG_PLUGINS")
            for point in entry_points(group="sglang.srt.plugins"):
                if allowed is None or point.name in allowed.split(","):
                    try: point.load()()
                    except Exception: logging.exception("Failed to load plugin %s", point.name)
    """,
    "sglang/srt/entrypoints/engine.py": _ENGINE
    + """
    class Engine:
        def __init__(self, **kwargs):
            self.server_args = ServerArgs(**kwargs)
        @classmethod
        def _launch_subprocesses(cls, server_args): return launch(server_args)
    """,
    "sglang/srt/entrypoints/http_server.py": """
        from sglang.srt.entrypoints.engine import Engine
        def launch_server(server_args): Engine._launch_subprocesses(server_args)
    """,
    "sglang/srt/model_executor/model_runner.py": """
        from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import (
            capture_decode_graph, capture_prefill_graph)
        class ModelRunner:
            def load_model(self): print("loading", flush=True)
            def capture(self):
                capture_prefill_graph(model_runner=self, eager_runner=None)
                capture_decode_graph(model_runner=self)
    """,
    "sglang/srt/model_executor/model_runner_components/cuda_graph_setup.py": """
        def capture_decode_graph(*, model_runner): return "decode"
        def capture_prefill_graph(*, model_runner, eager_runner): return "prefill"
    """,
}
_OLD = {
    "sglang/srt/server_args_config_parser.py": _CONFIG_PARSER,
    "sglang/srt/entrypoints/engine.py": _ENGINE
    + """
    class Engine:
        run_scheduler_process_func = staticmethod(run_scheduler_process)
        def __init__(self, **kwargs):
            self.server_args = ServerArgs(**kwargs)
    def _launch_subprocesses(server_args): return launch(server_args)
    """,
    "sglang/srt/entrypoints/http_server.py": """
        from sglang.srt.entrypoints.engine import _launch_subprocesses
        def launch_server(server_args): _launch_subprocesses(server_args=server_args)
    """,
    "sglang/srt/compilation/compile.py": """
        def install_torch_compiled(
            module, *, fullgraph=True, backend_factory=None, compile_config=None, graph_pool=None
        ):
            return "SGLang's own" if backend_factory is None else "a plugin's"
    """,
    "sglang/srt/model_executor/model_runner.py": """
        from sglang.srt.compilation.compile import install_torch_compiled
        class ModelRunner:
            def load_model(self): print("loading", flush=True)
            def forward(self): pass
            def init_device_graphs(self): pass
            def init_piecewise_cuda_graphs(self):
                print("the backend is", install_torch_compiled(self, fullgraph=True), flush=True)
            def capture(self):
                self.init_device_graphs()
                self.init_piecewise_cuda_graphs()
    """,
}


def runnable_sglang(version: str) -> dict[str, str]:
    """The files of the package and its metadata, by path."""
    new = version != "0.5.9"
    load = "from sglang.srt.plugins import load_plugins" if new else "def load_plugins(): pass"
    config_parser = "sglang.srt.utils.server_args_config_parser" if new else "sglang.srt.server_args_config_parser"
    files = {
        name: source.replace("LOAD\n", f"{load}\n").replace("CONFIG_PARSER", config_parser)
        for name, source in (_COMMON | (_NEW if new else _OLD)).items()
    }
    return files | {
        f"sglang-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
    }
