"""A name that is taken: reused if it is ours, refused with its owner if it is not."""

import pytest
import torch

from glm5_plugins.fp4 import operator as operators
from glm5_plugins.fp4.calls import FP4_QUANTIZE
from glm5_plugins.fp4.operator import Operator, OperatorConflict
from tests.unit.fp4 import upstream


def test_binding_twice_reuses_the_registration(new_operator):
    first = new_operator("0.7.4")
    second = Operator(FP4_QUANTIZE, namespace=first.qualified_name.partition("::")[0])
    second.bind(upstream.wrapped(upstream.fp4_quantize_0_7_4), version="0.7.4")
    assert second.overload is first.overload
    assert second.replacement is first.replacement
    assert first.bound.function is not upstream.fp4_quantize_0_7_4


def test_binding_the_replacement_changes_nothing(new_operator):
    operator = new_operator("0.7.4")
    operator.bind(operator.replacement)
    assert operator.bound.function is upstream.fp4_quantize_0_7_4


def test_another_signature_in_one_process_is_refused(new_operator):
    operator = new_operator("0.7.4")
    with pytest.raises(OperatorConflict, match=r"already registered by this layer .*one version"):
        operator.bind(upstream.fp4_quantize_0_6_3, version="0.6.3")


def test_a_foreign_operator_is_refused_and_its_owner_named():
    library = torch.library.Library("glm5_test_foreign", "FRAGMENT")
    library.define("fp4_quantize(Tensor input) -> Tensor")
    operator = Operator(FP4_QUANTIZE, namespace="glm5_test_foreign")
    with pytest.raises(OperatorConflict, match=r"foreign::fp4_quantize is already .*test_registration\.py:\d+"):
        operator.bind(upstream.fp4_quantize_0_7_4, version="0.7.4")
    assert str(torch.ops.glm5_test_foreign.fp4_quantize.default._schema).endswith("(Tensor input) -> Tensor")


def test_an_operator_made_by_custom_op_is_found_too():
    @torch.library.custom_op("glm5_test_custom::fp4_quantize", mutates_args=())
    def theirs(input: torch.Tensor) -> torch.Tensor:
        return input.clone()

    with pytest.raises(OperatorConflict, match=r"already registered by .*test_registration\..*theirs"):
        Operator(FP4_QUANTIZE, namespace="glm5_test_custom").bind(upstream.fp4_quantize_0_7_4, version="0.7.4")


def test_nothing_is_registered_before_bind():
    operator = Operator(FP4_QUANTIZE, namespace="glm5_test_unbound")
    assert operators.registered_by(operator.qualified_name) is None
    with pytest.raises(RuntimeError, match=r"call bind\(\) first"):
        _ = operator.replacement


def test_a_failed_bind_registers_nothing():
    operator = Operator(FP4_QUANTIZE, namespace="glm5_test_failed")
    with pytest.raises(TypeError):
        operator.bind(lambda x: x, version="0.7.4")
    assert operators.registered_by(operator.qualified_name) is None


def test_the_default_namespace_is_ours_and_not_that_of_flashinfer():
    assert Operator(FP4_QUANTIZE).qualified_name == "glm5::fp4_quantize"
