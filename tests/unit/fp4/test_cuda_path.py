"""What the CUDA kernel of the operator does, run on CPU tensors with stand-ins for FlashInfer."""

import pytest
import torch

from glm5_plugins.fp4.layouts import LayoutError
from tests.unit.fp4 import upstream

INPUT, SCALE = torch.zeros(4, 64, dtype=torch.bfloat16), torch.ones(1)


@pytest.mark.parametrize("version", upstream.VERSIONS)
def test_arguments_arrive_by_name(new_operator, version):
    operator = new_operator(version)
    names = [argument.name for argument in operator.overload._schema.arguments]
    given = {
        "input": INPUT,
        "global_scale": SCALE,
        "sf_vec_size": 32,
        "sf_use_ue8m0": True,
        "is_sf_swizzled_layout": False,
        "is_sf_8x4_layout": True,
        "is_global_scale_inversed": True,
        "enable_pdl": False,
        "backend": "cute-dsl",
        "batch_invariant": True,
    }
    operator.bound.on_cuda(*(given[name] for name in names))
    (got,) = upstream.calls
    assert {name: got[name] for name in names} == {name: given[name] for name in names}
    assert got.get("nvfp4_4over6", upstream.UNSET) is upstream.UNSET


def test_outputs_are_handed_on_untouched(new_operator):
    packed, scales = new_operator("0.6.12").bound.on_cuda(INPUT, SCALE)
    assert packed is INPUT
    assert scales is INPUT


def test_zero_rows_are_not_launched(new_operator):
    packed, scales = new_operator("0.6.12").bound.on_cuda(INPUT[:0], SCALE)
    assert (packed.shape, scales.shape) == ((0, 32), (0, 4))
    assert upstream.calls == []


def test_an_upstream_assertion_is_explained(new_operator):
    with pytest.raises(LayoutError, match="positive multiple") as caught:
        new_operator("0.6.3").bound.on_cuda(torch.zeros(4, 40), SCALE)
    assert isinstance(caught.value.__context__, AssertionError)


def test_other_upstream_errors_pass_untouched(new_operator):
    def fp4_quantize(input, global_scale=None, sf_vec_size=16, is_sf_swizzled_layout=True, is_sf_8x4_layout=False):
        raise ZeroDivisionError("theirs")

    with pytest.raises(ZeroDivisionError, match="theirs"):
        new_operator("0.7.4", function=fp4_quantize).bound.on_cuda(INPUT, SCALE)


def kernel_calls():
    seen = []

    def kernel(
        input,
        global_scale,
        sf_vec_size,
        sf_use_ue8m0,
        is_sf_swizzled_layout,
        is_sf_8x4_layout,
        enable_pdl=None,
    ):
        seen.append((sf_vec_size, sf_use_ue8m0, is_sf_swizzled_layout, is_sf_8x4_layout, enable_pdl))
        return input, torch.zeros(128 * 4, dtype=torch.uint8)

    return kernel, seen


@pytest.mark.parametrize("version", ["0.6.3", "0.6.8"])
def test_only_the_first_call_on_a_device_goes_through_the_loader(new_operator, version):
    kernel, seen = kernel_calls()
    function, log = upstream.with_loader(upstream.VERSIONS[version], kernel)
    operator = new_operator(version, function=function)
    operator.bound.on_cuda(INPUT, SCALE)
    assert (len(upstream.calls), seen, log) == (1, [], ["120"])
    _, scales = operator.bound.on_cuda(INPUT, SCALE)
    operator.bound.on_cuda(INPUT, SCALE, 16, False, True, True, False)
    assert (len(upstream.calls), log) == (1, ["120"])
    assert seen == [(16, False, True, False, True), (16, False, True, True, False)]
    assert scales.shape == (128, 4)


@pytest.mark.parametrize(
    ("input", "arguments"),
    [
        (torch.zeros(4, 64).t(), ()),
        (INPUT, (16, False, True, False, None, "cute-dsl")),
        (INPUT, (8,)),
    ],
)
def test_unusual_calls_stay_with_the_function(new_operator, input, arguments):
    kernel, seen = kernel_calls()
    function, _ = upstream.with_loader(upstream.fp4_quantize_0_6_8, kernel)
    operator = new_operator("0.6.8", function=function)
    operator.bound.on_cuda(INPUT, SCALE)
    operator.bound.on_cuda(input, SCALE, *arguments)
    assert (len(upstream.calls), seen) == (2, [])


def test_a_kernel_with_other_parameters_is_not_called_straight(new_operator):
    function, _ = upstream.with_loader(upstream.fp4_quantize_0_6_3, lambda input, extra: None)
    operator = new_operator("0.6.3", function=function)
    for _ in range(3):
        operator.bound.on_cuda(INPUT, SCALE)
    assert len(upstream.calls) == 3


def test_a_wrapped_function_is_never_bypassed(new_operator):
    kernel, seen = kernel_calls()
    function, _ = upstream.with_loader(upstream.fp4_quantize_0_6_3, kernel)
    operator = new_operator("0.6.3", function=upstream.wrapped(function))
    for _ in range(3):
        operator.bound.on_cuda(INPUT, SCALE)
    assert (len(upstream.calls), seen) == (3, [])
