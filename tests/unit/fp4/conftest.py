import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from glm5_plugins.fp4.calls import FP4_QUANTIZE, Call
from glm5_plugins.fp4.operator import Operator
from tests.unit.fp4 import upstream

_numbers = itertools.count()


@pytest.fixture
def run_python() -> Callable[[str], str]:
    """Run code in a fresh interpreter and return what it printed; its failure is the test's."""

    def run(code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(autouse=True)
def forget_calls() -> Iterator[None]:
    upstream.calls.clear()
    yield
    upstream.calls.clear()
    torch._dynamo.reset()


@pytest.fixture
def new_operator() -> Callable[..., Operator]:
    """Make an operator of a namespace of its own: torch never forgets one."""

    def make(
        version: str = "0.7.4", call: Call = FP4_QUANTIZE, function: Any = None, reference: bool = True
    ) -> Operator:
        operator = Operator(call, namespace=f"glm5_test_{next(_numbers)}")
        operator.bind(function or upstream.VERSIONS[version], version=version)
        if reference:
            operator.allow_reference()
        return operator

    return make
