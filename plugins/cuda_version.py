"""FlashInfer's `get_cuda_version` answers at once, from what is installed.

FlashInfer asks `nvcc --version` in a subprocess the first time somebody wants the CUDA version. That caches for
Python, but not for Dynamo, which walks through `functools.cache` into the subprocess and stops: `Attempted to call
function marked as skipped`. Here FlashInfer's own function is asked once, when its module is imported and before
anything is traced; from then on its answer is a constant that Dynamo folds.

This takes away the first thing Dynamo stops at, not the last: the next is the JIT loader itself, which `fp4_custom_op`
hides behind an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from glm5_plugins import NotApplicable, Patch, hookimpl


def _answer_once(original: Callable[[], Any]) -> Callable[[], Any]:
    try:
        answer = original()
    except RuntimeError as error:
        raise NotApplicable(f"FlashInfer finds no CUDA here: {error}") from error

    def get_cuda_version() -> Any:
        return answer

    return get_cuda_version


@hookimpl
def glm5_patches() -> Iterator[Patch]:
    """Replace the function and every from-import of it."""
    yield Patch(
        target="flashinfer.jit.cpp_ext:get_cuda_version",
        using=_answer_once,
        reason="FlashInfer asks nvcc for its version once, before anything is traced",
        requires="flashinfer-python>=0.6.1",
        upstream="https://github.com/sgl-project/sglang/issues/23386",
        fate="delete when FlashInfer no longer starts a subprocess in a function that is traced",
    )
