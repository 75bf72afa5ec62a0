"""The operator has the schema, and the replacement the signature, of the version that was bound."""

import inspect

import pytest
import torch

from glm5_plugins.fp4.calls import CALLS, NVFP4_QUANTIZE
from glm5_plugins.fp4.layouts import LAYOUT_RULES
from glm5_plugins.fp4.operator import SignatureMismatch
from glm5_plugins.fp4.sites import RAW
from tests.unit.fp4 import upstream

HEAD = (
    "fp4_quantize(Tensor input, Tensor? global_scale=None, int sf_vec_size=16, bool sf_use_ue8m0=False, "
    "bool is_sf_swizzled_layout=True, bool is_sf_8x4_layout=False, "
)
SCHEMAS = {
    "0.6.3": "bool? enable_pdl=None",
    "0.6.8": 'bool? enable_pdl=None, str backend="cuda"',
    "0.6.12": 'bool is_global_scale_inversed=False, bool? enable_pdl=None, str backend="cuda"',
    "0.7.2": 'bool is_global_scale_inversed=False, bool? enable_pdl=None, str backend="cuda"',
    "0.7.4": 'bool is_global_scale_inversed=False, bool? enable_pdl=None, str backend="auto", '
    "bool batch_invariant=False",
}


@pytest.mark.parametrize("version", upstream.VERSIONS)
def test_schema_follows_the_version(new_operator, version):
    operator = new_operator(version)
    assert operator.bound.schema == f"{HEAD}{SCHEMAS[version]}) -> (Tensor, Tensor)"
    assert str(operator.overload._schema).partition("::")[2] == operator.bound.schema


@pytest.mark.parametrize("version", upstream.VERSIONS)
@pytest.mark.parametrize("wrap", [lambda function: function, upstream.wrapped], ids=["bare", "wrapped"])
def test_replacement_has_the_upstream_signature(new_operator, version, wrap):
    operator = new_operator(version, function=wrap(upstream.VERSIONS[version]))
    assert inspect.signature(operator.replacement) == inspect.signature(upstream.VERSIONS[version])


@pytest.mark.parametrize("version", upstream.VERSIONS)
def test_layout_rules_follow_the_version(new_operator, version):
    assert new_operator(version).bound.rules is LAYOUT_RULES[version != "0.6.3"]


def test_version_is_read_from_the_package_of_the_function(new_operator, monkeypatch):
    monkeypatch.setattr(upstream, "__version__", "0.6.8.post1+cu130", raising=False)
    operator = new_operator("0.6.8")
    operator.bind(upstream.fp4_quantize_0_6_8)
    assert operator.bound.rules is LAYOUT_RULES[1]


def test_an_unknown_parameter_is_refused_by_name(new_operator):
    def fp4_quantize(input, global_scale=None, swirl=0):
        raise AssertionError

    with pytest.raises(
        SignatureMismatch, match=r"unknown parameter swirl\. Known for flashinfer:fp4_quantize: backend, "
    ):
        new_operator(function=fp4_quantize)


def test_a_function_of_another_package_is_refused(new_operator):
    def scaled_fp4_quant(input_scale):
        raise AssertionError

    with pytest.raises(SignatureMismatch, match="unknown parameter input_scale"):
        new_operator(function=scaled_fp4_quant)
    with pytest.raises(SignatureMismatch, match="no parameter input"):
        new_operator(function=lambda global_scale=None: None)


def test_a_default_that_is_no_literal_is_refused(new_operator):
    def fp4_quantize(input, backend=UNKNOWN):
        raise AssertionError

    with pytest.raises(SignatureMismatch, match="default of backend is no schema literal"):
        new_operator(function=fp4_quantize)


UNKNOWN = object()


def test_a_version_outside_the_row_is_refused(new_operator):
    with pytest.raises(SignatureMismatch, match=r"described for FlashInfer >=0\.6\.8, not 0\.6\.3"):
        new_operator("0.6.3", call=NVFP4_QUANTIZE, function=lambda a, a_global_sf: None)


def test_replacement_takes_positions_and_keywords_alike(new_operator):
    operator = new_operator("0.6.12")
    values, scale = torch.randn(4, 64).to(torch.bfloat16), torch.ones(1)
    by_position = operator.replacement(values, scale, 16, False, False)
    by_keyword = operator.replacement(global_scale=scale, input=values, is_sf_swizzled_layout=False)
    assert all(torch.equal(left, right) for left, right in zip(by_position, by_keyword, strict=True))


def test_the_table_of_sites_names_the_parameters_that_operators_know():
    of = {call.name: [*call.parameters, *call.refused] for call in CALLS}
    assert {raw.function: sorted(raw.parameters) for raw in RAW} == {name: sorted(known) for name, known in of.items()}
    assert {raw.function: raw.parameters[0] for raw in RAW} == {name: known[0] for name, known in of.items()}
