"""A training state of a given size: parameters and the moments of AdamW, nothing that computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moc.errors import ConfigError

__all__ = ["Shape", "State"]

_WIDTH = 1024  # numbers in a row of a matrix, as far as the size allows
_ITEM_BYTES = 4
_PARTS = 3  # the parameter and its two moments


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is to be saved.

    Attributes:
        nbytes: parameters and moments together, about.
        tensors: parameters and moments together, about; every third parameter is a vector, as
            norms and biases are.
        experts: routed experts per MoE layer, as stacked tensors; 0 for a dense model.

    Raises:
        ConfigError: a tensor would have no numbers.
    """

    nbytes: int
    tensors: int
    experts: int = 0

    def __post_init__(self) -> None:
        if self.tensors < _PARTS or self.experts < 0:
            raise ConfigError(
                f"a state of {self.tensors} tensors with {self.experts} experts: at least {_PARTS} "
                "tensors (a parameter and its two moments), at least 0 experts"
            )
        if self._matrix < 1:
            raise ConfigError(
                f"{self.nbytes} bytes are too few for {self.tensors} tensors with {self.experts} "
                "experts; use fewer tensors or more megabytes"
            )

    @property
    def _width(self) -> int:
        """Numbers in a row."""
        each = self.nbytes // (self.tensors * _ITEM_BYTES)
        return max(1, min(_WIDTH, each // 4))

    @property
    def _matrix(self) -> int:
        """Rows of each matrix; of each expert's part of it, where there are experts."""
        count = self.tensors // _PARTS
        vectors = count // 3
        numbers = self.nbytes // (_PARTS * _ITEM_BYTES) - vectors * self._width
        return numbers // ((count - vectors) * self._width * (self.experts or 1))

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        rows, width = self._matrix, self._width
        shapes: dict[str, tuple[int, ...]] = {}
        for index in range(self.tensors // _PARTS):
            if index % 3 == 2:
                shapes[f"norm{index}"] = (width,)
            elif self.experts:
                shapes[f"layer{index}.experts.w1"] = (self.experts, rows, width)
            else:
                shapes[f"matrix{index}"] = (rows, width)
        return shapes


class State:
    """A model and its optimizer, as a checkpoint sees them.

    Attributes:
        model: holds the parameters; nobody calls it.
        optimizer: AdamW with filled moments.
    """

    def __init__(self, shape: Shape) -> None:
        """Fill everything with random numbers, alike in every run."""
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Module()
        for name, sizes in shape.parameters().items():
            *path, leaf = name.split(".")
            home = self.model
            for part in path:
                if not hasattr(home, part):
                    home.add_module(part, nn.Module())
                home = home.get_submodule(part)
            value = torch.randn(sizes, generator=generator)
            home.register_parameter(leaf, nn.Parameter(value))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for param in self.model.parameters():
            self.optimizer.state[param] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.randn(param.shape, generator=generator),
                "exp_avg_sq": torch.rand(param.shape, generator=generator),
            }

    def tensors(self) -> list[Tensor]:
        """Parameters and moments, in the order in which a state dict has them."""
        params = list(self.model.parameters())
        entries = [self.optimizer.state[p] for p in params]
        moments = [e[part] for e in entries for part in ("exp_avg", "exp_avg_sq")]
        return [*(p.detach() for p in params), *moments]

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def change(self) -> None:
        """Give every number another value: what has not changed is not written again."""
        with torch.no_grad():
            torch._foreach_add_(self.tensors(), 1.0)

    def optimizer_step(self) -> None:
        """An optimizer step without gradients: its hooks run, its numbers stay."""
        self.optimizer.step()

    def dicts(self) -> dict[str, object]:
        """What a trainer hands to `torch.save` and its kin."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
