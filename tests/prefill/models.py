"""Models with graph breaks, each small and each of a shape that a careless capture gets wrong."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 8

_library = torch.library.Library("glm5_test", "DEF")
_library.define("attention(Tensor x, Tensor(a!) output) -> ()")
_library.define("add_and_normalise(Tensor(a!) x, Tensor(b!) residual) -> ()")


def attention(x: torch.Tensor, output: torch.Tensor) -> None:
    """Stands for attention, at which SGLang splits a graph: every row is mixed with the one before.

    Like SGLang's own, it runs between two captured pieces and writes into memory that the first of them made.
    """
    output.copy_(x + x.roll(1, 0))


def add_and_normalise(x: torch.Tensor, residual: torch.Tensor) -> None:
    """As SGLang's fused layer norm does: both tensors are changed in place."""
    residual.add_(x)
    x.copy_(residual / (1 + residual.abs().amax(-1, keepdim=True)))


_library.impl("attention", attention, "CompositeExplicitAutograd")
_library.impl("add_and_normalise", add_and_normalise, "CompositeExplicitAutograd")
torch.library.register_fake("glm5_test::attention", lambda x, output: None, lib=_library)
torch.library.register_fake("glm5_test::add_and_normalise", lambda x, residual: None, lib=_library)


@torch.compiler.disable
def raw_quantize(x: torch.Tensor) -> torch.Tensor:
    """Stands for a raw `fp4_quantize` call: Dynamo cannot go into it, and it returns new memory."""
    return (x * 4).round() / 4


class Layer(nn.Module):
    """Normalise, attend, and an MLP with the break in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.ops.glm5_test.add_and_normalise(x, residual)
        attended = torch.empty_like(x)
        torch.ops.glm5_test.attention(x, attended)
        return self.mlp(attended), residual

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(raw_quantize(self.up(x)).relu())


class WholeLayer(Layer):
    """The same layer without a break."""

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Decoder(nn.Module):
    """Several equal layers, as in a served model."""

    width = WIDTH

    def __init__(self, layer: type[nn.Module] = Layer, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x + residual


class WeakOutputs(nn.Module):
    """The second graph reads what the first one gave out, after it has made memory of its own."""

    width = WIDTH

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        torch._dynamo.graph_break()
        return y + self.c(self.b(y))


class EagerOutputs(WeakOutputs):
    """Code between two graphs hands the second one new memory at every call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(raw_quantize(self.a(x)))


_buffer = torch.zeros(64, WIDTH)


@torch.compiler.disable
def staged(x: torch.Tensor) -> torch.Tensor:
    """Code between two graphs that always hands out the same memory."""
    return _buffer[: len(x)].copy_(x)


class Staged(nn.Module):
    """A layer whose break is at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return staged(self.up(x).relu() + x)


class SharedGraph(nn.Module):
    """Equal layers run one and the same graph, the only one there is, each with its own parameters."""

    width = WIDTH

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Staged() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@torch.compiler.disable
def new_residual(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x)


@torch.compiler.disable
def read(residual: torch.Tensor) -> torch.Tensor:
    return residual.clone()


class InPlace(WeakOutputs):
    """A graph changes a residual in place that code before it made and code after it reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = staged(self.a(x))
        residual = new_residual(hidden)
        torch.ops.glm5_test.add_and_normalise(hidden, residual)
        return read(residual)


class Switching(WeakOutputs):
    """Whole as long as `mode` is 0; another graph for every other even mode, and a break for odd ones."""

    mode = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) + self.mode
        if self.mode % 2:
            y = raw_quantize(y)
        return self.b(y)
