"""Master copies of parameters, which a mixed-precision wrapper keeps and its optimizer steps.

The model's parameters are 16-bit, the optimizer's groups hold copies in float32; the wrapper hands
gradients over and casts the copies back after the step (Apex O2, Megatron). A master is saved
under the name of its parameter, and so is the optimizer state that belongs to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from moc.errors import ConfigError

__all__ = ["Masters", "resolve_masters"]

Masters = (
    Mapping[str, Tensor] | Mapping[nn.Parameter, Tensor] | Iterable[tuple[nn.Parameter, Tensor]]
)
"""Masters by parameter or by its name, or (parameter, master) pairs."""

_SHOWN = 8


def resolve_masters(
    masters: Masters | None, params: Mapping[str, nn.Parameter], aliases: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Masters by the one name of their parameter.

    Args:
        masters: as the user gave them.
        params: the model's parameters by name.
        aliases: the same, with the further names of tied ones.

    Raises:
        ConfigError: one belongs to no parameter, is no plain tensor of its parameter's shape, is a
            parameter of the model itself, or serves twice.
    """
    if masters is None:
        return {}
    try:
        pairs = [(k, m) for k, m in (masters.items() if isinstance(masters, Mapping) else masters)]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"masters={type(masters).__name__} is no mapping of parameters, or their names, to "
            f"master tensors, and no list of such pairs: {error}"
        ) from error
    names = {id(param): name for name, param in params.items()}
    found: dict[str, Tensor] = {}
    users: dict[int, str] = {}
    for key, master in pairs:
        param = aliases.get(key) if isinstance(key, str) else key
        name = names.get(id(param))
        if name is None:
            what = repr(key) if isinstance(key, str) else f"a {type(key).__name__}"
            some = ", ".join(list(params)[:_SHOWN])
            raise ConfigError(
                f"masters: {what} is no parameter of the model ({some}, ...); give the parameters "
                "themselves, or their names in the unwrapped model"
            )
        if name in found:
            raise ConfigError(f"masters: {name} has two masters; give each parameter one")
        _check(name, params[name], master)
        if id(master) in names:
            raise ConfigError(
                f"masters: the master of {name} is {names[id(master)]} of the model itself; give "
                "the tensor that the optimizer holds"
            )
        other = users.setdefault(id(master), name)
        if other != name:
            raise ConfigError(f"masters: {other} and {name} have the same tensor as master")
        found[name] = master
    return found


def _check(name: str, param: nn.Parameter, master: object) -> None:
    if not isinstance(master, Tensor) or master.layout != torch.strided or master.is_meta:
        raise ConfigError(f"masters: {type(master).__name__} of {name} is no plain tensor")
    if master.shape != param.shape:
        raise ConfigError(
            f"masters: the master of {name} has shape {tuple(master.shape)}, the parameter "
            f"{tuple(param.shape)}; slices and flattened masters are not supported"
        )
    if master.is_complex() != param.is_complex() or master.is_floating_point() != (
        param.is_floating_point()
    ):
        raise ConfigError(
            f"masters: the master of {name} is {master.dtype}, the parameter {param.dtype}; one "
            "must be a cast of the other"
        )
