"""Before a server serves: the same prompts through the prefill graph and through the model as it is written.

Both times SGLang's own runner pads the prompt into its static buffers and runs the model on them; only the compiled,
captured model is swapped for the plain one. So equal kernels get equal shapes, and what differs is the graph's doing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from glm5_plugins.prefill.compiling import Compilation

# Where the version keeps the functions that run one prompt on a model runner: `extend`, and what makes its input.
_BENCHES = ("sglang.benchmark.one_batch", "sglang.bench_one_batch")  # from 0.5.15, and up to 0.5.14
# What SGLang up to 0.5.13 sets on a model runner only after it has made the prefill graph.
_SET_LATER = {"support_pp": False, "hisparse_coordinator": None}

_VOCABULARY = 200
"""Token ids below this are used: every vocabulary has them."""


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Args:
        ran: Whether every prompt went through the graph; if not, nothing was checked.
        text: What was compared, or why it could not be, or what differs.
        wrong: Whether answers differ by more than is tolerated.
    """

    ran: bool
    text: str
    wrong: bool = False


def check(
    model_runner: Any, runner: Any, compilation: Compilation, sizes: Sequence[int], tolerance: float | None
) -> Finding:
    """Compare the answers to two prompts of each size, the first of them asked again after the second.

    Args:
        model_runner: SGLang's `ModelRunner`, with its memory pools; they are emptied.
        runner: Its runner of the prefill graph.
        compilation: The model that the plugin had compiled.
        sizes: Numbers of tokens that are captured.
        tolerance: How far a logit may be off. None: any, as long as the most likely token is the same.

    Returns:
        What was found. Nothing is raised for a version whose way of running one prompt has changed.
    """
    lengths = [size for size in sizes if size <= _longest(model_runner)]
    lengths = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]}) if lengths else []
    if not lengths:
        return Finding(False, "no captured size fits into the memory pool")
    largest = 0.0
    try:
        for length in lengths:
            first, second = _prompts(length)
            with _in_place(model_runner, runner) as outputs:
                graph = [_logits(model_runner, prompt) for prompt in (first, second, first)]
                if not all(output.can_run_graph for output in outputs):
                    return Finding(False, f"SGLang runs a prompt of {length} tokens past the graph")
                compilation.as_written = True
                try:
                    plain = [_logits(model_runner, prompt) for prompt in (first, second)]
                finally:
                    compilation.as_written = False
            for ours, reference in zip(graph, (*plain, plain[0]), strict=True):
                off = float((ours.float() - reference.float()).abs().max())
                largest = max(largest, off)
                token, expected = int(ours.argmax()), int(reference.argmax())
                beyond = tolerance is not None and not off <= tolerance
                if beyond or (tolerance is None and (token != expected or off != off)):
                    return Finding(
                        True,
                        f"a prompt of {length} tokens: the graph gives token {token}, the model as written {expected}; "
                        f"the logits differ by up to {off:g}",
                        wrong=True,
                    )
    except (ImportError, AttributeError, TypeError) as error:
        return Finding(False, f"this SGLang runs one prompt in another way: {type(error).__name__}: {error}")
    return Finding(True, f"prompts of {_words(lengths)} tokens: the same tokens, logits off by up to {largest:g}")


def _words(lengths: Sequence[int]) -> str:
    *most, last = map(str, lengths)
    return f"{', '.join(most)} and {last}" if most else last


def _longest(model_runner: Any) -> int:
    """The longest prompt that the memory pool and the model take, with room for one more token."""
    return int(min(model_runner.max_total_num_tokens, model_runner.model_config.context_len)) - 1


def _prompts(length: int) -> tuple[list[int], list[int]]:
    """Two prompts, the same in every process."""
    numbers = random.Random(length)
    first = [numbers.randrange(3, _VOCABULARY) for _ in range(length)]
    return first, [numbers.randrange(3, _VOCABULARY) for _ in range(length)]


@contextmanager
def _in_place(model_runner: Any, runner: Any) -> Iterator[list[Any]]:
    """Have the runner in use, which SGLang may do only later; yield what `model_runner.forward` returns."""
    outputs: list[Any] = []
    forward = model_runner.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        outputs.append(forward(*args, **kwargs))
        return outputs[-1]

    own = vars(model_runner)
    # From 0.5.14 the runner has can_run_graph and another place to be kept in.
    name = "prefill_cuda_graph_runner" if hasattr(runner, "can_run_graph") else "piecewise_cuda_graph_runner"
    later = {key: value for key, value in _SET_LATER.items() if not hasattr(model_runner, key)}
    put = {name: runner, "forward": watched, **later}
    before = {key: own[key] for key in put if key in own}
    own.update(put)
    try:
        yield outputs
    finally:
        for key in put:
            own.pop(key, None)
        own.update(before)
        _empty(model_runner)


def _logits(model_runner: Any, prompt: Sequence[int]) -> Any:
    """Run one prompt; return the logits of its next token, of shape (vocabulary,), dtype as the model gives them."""
    bench = _bench()
    _empty(model_runner)
    requests = bench.prepare_synthetic_inputs_for_latency_test(1, len(prompt), [list(prompt)])
    _, logits, _ = bench.extend(requests, model_runner)
    return logits[0].clone()


def _empty(model_runner: Any) -> None:
    model_runner.req_to_token_pool.clear()
    model_runner.token_to_kv_pool_allocator.clear()


def _bench() -> Any:
    for name in _BENCHES:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.rpartition(".")[0]):
                raise
    raise ImportError(f"neither {' nor '.join(_BENCHES)} is there")
