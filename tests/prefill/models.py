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
