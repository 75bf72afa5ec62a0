"""A FlashInfer function as a torch operator: same call, same bits, but opaque to Dynamo.

FlashInfer loads its kernels inside the call, and Dynamo cannot trace a loader. An operator hides the call and tells
the compiler only the shapes (`calls`, `layouts`).

    quantize = Operator(FP4_QUANTIZE)
    quantize.bind(flashinfer.fp4_quantize)
    module.fp4_quantize = quantize.replacement

On CUDA the operator calls the bound function by keyword and changes nothing, except that empty inputs give empty
outputs without a launch, and that an input the kernels cannot take is explained. On CPU it refuses, unless the
PyTorch reference was asked for. An argument that cannot pass an operator is refused, never dropped.

The replacement calls the operator wherever something watches: a compiler, a dispatch mode, a fake tensor. In plain
eager code it runs what the operator runs on CUDA, without torch's dispatcher.

Where the bound function is FlashInfer's bare Python (0.6.1 to 0.6.8.post1, at log level 0), the first call on each
device goes through it, with all its checks; later calls go straight to the kernel function that it would look up
again.

An operator cannot be taken back from torch: it is registered once in a process and stays. What a plugin restores is
the attribute that held the replacement.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch._library import custom_ops

from glm5_plugins.fp4.calls import Call, Outputs, Unrepresentable
from glm5_plugins.fp4.layouts import LayoutRules, release, rules_for

NAMESPACE = "glm5"
"""Namespace of our operators. FlashInfer's own (`flashinfer::fp4_quantize`) is never touched: it exists from 0.6.12
on and forwards its arguments wrongly until 0.7.1."""


class OperatorConflict(RuntimeError):
    """The operator's name, or its schema, is already taken in this process."""


class SignatureMismatch(TypeError):
    """The function to bind does not have the parameters that the table knows."""


class NoKernel(NotImplementedError):
    """The operator ran on a device for which it has no kernel."""


class Operator:
    """A row of `calls`, registered with torch under `namespace::name`.

    Making the object registers nothing; `bind` does.

    Args:
        call: the row.
        namespace: of the operator; only tests use another one.
    """

    def __init__(self, call: Call, namespace: str = NAMESPACE) -> None:
        self.call = call
        self.qualified_name = f"{namespace}::{call.name}"

    def bind(self, function: Callable[..., Any], *, version: str | None = None) -> None:
        """Register the operator for this function, or point the registered one at it.

        Args:
            function: FlashInfer's own, raw or behind FlashInfer's API wrapper. The replacement of this very
                operator is accepted and changes nothing, so applying a patch twice is harmless.
            version: of FlashInfer; by default, what the package of the function says.

        Raises:
            SignatureMismatch: a parameter is missing or unknown, or a default cannot be written in a schema.
            LayoutError: the version is not known (see `layouts.rules_for`).
            OperatorConflict: somebody else has registered the name, or this layer did for another signature.
        """
        bound = _BOUND.get(self.qualified_name)
        if bound is not None and function is bound.replacement:
            return
        signature = _Signature.read(self.call, function)
        rules = _rules(self.call, function, version, signature)
        schema = signature.schema(self.call)
        if bound is not None:
            if bound.schema != schema:
                raise OperatorConflict(
                    f"{self.qualified_name} is already registered by this layer with the schema "
                    f"{bound.schema!r}; the function to bind asks for {schema!r}. "
                    "A process can bind one version of FlashInfer"
                )
            bound.rebind(function, rules)
            return
        owner = registered_by(self.qualified_name)
        if owner is not None:
            raise OperatorConflict(
                f"the torch operator {self.qualified_name} is already registered by {owner}; it is not "
                "replaced. Remove whatever registers it, or this plugin"
            )
        _BOUND[self.qualified_name] = _Bound(self.qualified_name, self.call, signature, schema, function, rules)

    @property
    def is_bound(self) -> bool:
        """Whether the operator is registered."""
        return self.qualified_name in _BOUND

    @property
    def bound(self) -> _Bound:
        """Return the registration.

        Raises:
            RuntimeError: nothing has been bound.
        """
        try:
            return _BOUND[self.qualified_name]
        except KeyError:
            raise RuntimeError(f"{self.qualified_name} is not registered: call bind() first") from None

    @property
    def replacement(self) -> Callable[..., Any]:
        """Return a plain function with the upstream signature that calls the operator.

        It can be traced: it only checks that refused parameters have their defaults, by identity.
        """
        return self.bound.replacement

    @property
    def overload(self) -> Any:
        """Return the torch `OpOverload`."""
        return self.bound.overload

    @property
    def fired(self) -> int:
        """Return how often a kernel ran, on any device. Replays of a captured graph do not count."""
        return self.bound.fired

    @property
    def traced(self) -> int:
        """Return how often shapes were asked for without data: by a compiler, or for the meta device."""
        return self.bound.traced

    def allow_reference(self, allowed: bool = True) -> None:
        """Let the operator compute on CPU with `reference`, for tests; the default is to refuse.

        Raises:
            NoKernel: the row has no reference.
        """
        if allowed and self.call.reference is None:
            raise NoKernel(f"{self.qualified_name} has no PyTorch reference")
        self.bound.reference_allowed = allowed


@dataclass(frozen=True)
class _Parameter:
    """One parameter that passes the operator."""

    name: str
    schema_type: str
    default: Any
    enum: type[Enum] | None

    @property
    def schema(self) -> str:
        if self.default is inspect.Parameter.empty:
            return f"{self.schema_type} {self.name}"
        default = self.default.value if self.enum else self.default
        literal = f'"{default}"' if isinstance(default, str) else repr(default)
        return f"{self.schema_type} {self.name}={literal}"


@dataclass(frozen=True)
class _Signature:
    """The parameters of one version of an upstream function, split by what an operator can carry."""

    whole: inspect.Signature
    passed: tuple[_Parameter, ...]
    refused: Mapping[str, str]

    @classmethod
    def read(cls, call: Call, function: Callable[..., Any]) -> _Signature:
        """Compare the function with its row.

        Raises:
            SignatureMismatch: see `Operator.bind`.
        """
        whole = inspect.signature(function)
        known = {*call.parameters, *call.refused}
        unknown = [name for name in whole.parameters if name not in known]
        first = next(iter(call.parameters))
        if unknown or first not in whole.parameters:
            raise SignatureMismatch(
                f"cannot make an operator of {_describe(function)}{whole}: "
                + (f"unknown parameter {', '.join(unknown)}" if unknown else f"no parameter {first}")
                + f". Known for {call.upstream}: {', '.join(sorted(known))}"
            )
        passed = []
        refused = {}
        for name, parameter in whole.parameters.items():
            if name in call.refused:
                if parameter.default is inspect.Parameter.empty:
                    raise SignatureMismatch(f"{_describe(function)} has no default for {name}: {call.refused[name]}")
                refused[name] = call.refused[name]
                continue
            enum = type(parameter.default) if isinstance(parameter.default, Enum) else None
            default = parameter.default
            if not enum and default is not inspect.Parameter.empty and not isinstance(default, _LITERALS):
                raise SignatureMismatch(
                    f"{_describe(function)}: the default of {name} is no schema literal: {default!r}"
                )
            passed.append(_Parameter(name, call.parameters[name], default, enum))
        return cls(whole, tuple(passed), refused)

    def schema(self, call: Call) -> str:
        """Write the schema; parameters keep upstream's order and defaults."""
        outputs = "Tensor" if call.outputs == 1 else f"({', '.join(['Tensor'] * call.outputs)})"
        return f"{call.name}({', '.join(parameter.schema for parameter in self.passed)}) -> {outputs}"


_Library: Any = torch.library.Library
"""Untyped in torch."""

_LITERALS = (bool, int, str, type(None))


class _Bound:
    """A registered operator and the function it calls.

    Attributes:
        replacement: see `Operator.replacement`.
        overload: the torch `OpOverload`.
        schema: without namespace.
        takes_shortcut: calls go straight to the kernel function after the first one on a device.
    """

    def __init__(
        self,
        qualified_name: str,
        call: Call,
        signature: _Signature,
        schema: str,
        function: Callable[..., Any],
        rules: LayoutRules,
    ) -> None:
        namespace, name = qualified_name.split("::")
        self.qualified_name = qualified_name
        self.call = call
        self.schema = schema
        self.reference_allowed = False
        self.fired = 0
        self.traced = 0
        self._signature = signature
        self._names = tuple(parameter.name for parameter in signature.passed)
        self._enums = tuple((item.name, item.enum) for item in signature.passed if item.enum)
        self._defaults = tuple(
            parameter.default.value if parameter.enum else parameter.default for parameter in signature.passed
        )
        self.rebind(function, rules)
        # The library owns the registrations: they go when it does.
        self._library = _Library(namespace, "FRAGMENT")
        self._library.define(schema, tags=_tags())
        self._library.impl(name, self.on_cuda, "CUDA")
        self._library.impl(name, self.on_cpu, "CPU")
        torch.library.register_fake(qualified_name, self.on_fake, lib=self._library)
        self.overload = getattr(getattr(torch.ops, namespace), name).default
        self.replacement = _write_replacement(self, signature)

    def rebind(self, function: Callable[..., Any], rules: LayoutRules) -> None:
        """Call another function of the same signature from now on."""
        self.function = function
        self.rules = rules
        shortcut = self.call.shortcut(function, rules) if self.call.shortcut else None
        self.takes_shortcut = shortcut is not None
        self._kernel = shortcut or self._by_keyword

    def on_cuda(self, subject: torch.Tensor, *arguments: Any) -> Any:
        self.fired += 1
        if not subject.numel():
            return self._plan(subject, *arguments)
        try:
            return self._kernel(subject, *arguments)
        except Exception:
            # Planning on the meta device allocates nothing; it says what is wrong with the input, if that is it.
            shape_only = torch.empty_strided(subject.shape, subject.stride(), dtype=subject.dtype, device="meta")
            self._plan(shape_only, *arguments)
            raise

    def _by_keyword(self, *arguments: Any) -> Any:
        named = dict(zip(self._names, arguments, strict=False))
        for name, enum in self._enums:
            if name in named:
                named[name] = enum(named[name])
        return self.function(**named)

    def on_cpu(self, *arguments: Any) -> Any:
        if not self.reference_allowed or self.call.reference is None:
            raise NoKernel(
                f"{self.qualified_name} was called with CPU tensors; {self.call.upstream} runs on CUDA only. "
                "Set GLM5_FP4_CUSTOM_OP_REFERENCE=1 to have it computed by the PyTorch reference, for tests"
            )
        self.fired += 1
        return self._one_or_all(self.call.reference(self._named(arguments), self.rules))

    def on_fake(self, *arguments: Any) -> Any:
        self.traced += 1
        return self._plan(*arguments)

    def _plan(self, *arguments: Any) -> Any:
        return self._one_or_all(self.call.plan(self._named(arguments), self.rules))

    def _named(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Name positional arguments and add the defaults that torch leaves out at the end."""
        return dict(zip(self._names, (*arguments, *self._defaults[len(arguments) :]), strict=True))

    def _one_or_all(self, outputs: Outputs) -> Any:
        return outputs[0] if self.call.outputs == 1 else outputs


_BOUND: dict[str, _Bound] = {}
"""Every operator that this layer has registered in this process, by qualified name."""


def registered_by(qualified_name: str) -> str | None:
    """Return who registered an operator, or None if there is none of that name."""
    namespace, name = qualified_name.split("::")
    if not hasattr(getattr(torch.ops, namespace), name):
        return None
    definition = custom_ops.OPDEFS.get(qualified_name)
    if definition is not None:  # for these, the dispatcher names a file of torch
        function = definition._init_fn
        return f"{function.__module__}.{function.__qualname__} (torch.library.custom_op)"
    dump: str = torch._C._dispatch_dump(qualified_name)  # the only place that tells who registered
    _, _, rest = dump.partition("registered at ")
    return rest.partition("\n")[0] or "an unknown place"


def _rules(call: Call, function: Callable[..., Any], version: str | None, signature: _Signature) -> LayoutRules:
    if version is None:
        package = inspect.unwrap(function).__module__.partition(".")[0]
        version = str(getattr(sys.modules.get(package), "__version__", "unknown"))
    released = release(version)
    if released is not None and released not in SpecifierSet(call.flashinfer):
        raise SignatureMismatch(f"{call.upstream} is described for FlashInfer {call.flashinfer}, not {version}")
    return rules_for(version, tuple(signature.whole.parameters))


def _tags() -> tuple[torch.Tag, ...]:
    """Return the tags of every operator; a compiler must not change input strides, for they decide the layout."""
    # needs_exact_strides came with torch 2.7.
    strides = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    return (torch.Tag.pt2_compliant_tag, strides)


def _write_replacement(bound: _Bound, signature: _Signature) -> Callable[..., Any]:
    """Write a function with the upstream signature, as `dataclasses` writes `__init__`.

    Binding `*args, **kwargs` at each call would cost time and could not be traced. Dynamo folds `_compiling()`, so
    what it traces is the call of the operator; a plain CUDA tensor in eager code skips torch's dispatcher.
    """
    call, qualified_name = bound.call, bound.qualified_name
    parameters = []
    defaults: dict[str, Any] = {}
    for name, parameter in signature.whole.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        if parameter.default is parameter.empty:
            parameters.append(name)
        else:
            defaults[f"_default_{name}"] = parameter.default
            parameters.append(f"{name}=_default_{name}")
    lines = [
        f"def make(_compiling, _modes, _Tensor, _on_cuda, _operator, _refuse, {', '.join(defaults)}):",
        f"    def {call.name}({', '.join(parameters)}):",
    ]
    for name in signature.refused:
        lines += [f"        if {name} is not _default_{name}:", f"            _refuse({name!r}, {name})"]
    subject = signature.passed[0].name
    passed = ", ".join(f"{item.name}.value" if item.enum else item.name for item in signature.passed)
    lines += [
        f"        if not _compiling() and type({subject}) is _Tensor and {subject}.is_cuda and not _modes():",
        f"            return _on_cuda({passed})",
        f"        return _operator({passed})",
        f"    return {call.name}",
        "",
    ]

    def refuse(name: str, value: Any) -> None:
        raise Unrepresentable(
            f"{qualified_name} cannot carry {name}={value!r}: {signature.refused[name]}. "
            f"Call {call.upstream} itself, outside traced code"
        )

    source = "\n".join(lines)
    filename = f"<{qualified_name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), scope)
    replacement: Callable[..., Any] = scope["make"](
        torch.compiler.is_compiling,
        torch._C._len_torch_dispatch_stack,
        torch.Tensor,
        bound.on_cuda,
        bound.overload,
        refuse,
        **defaults,
    )
    replacement.__module__ = __name__
    replacement.__doc__ = f"Call the torch operator `{qualified_name}` with the arguments of `{call.upstream}`."
    return replacement


def _describe(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
