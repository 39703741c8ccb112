"""State that modules keep beside parameters and buffers: `torch.nn.Module.get_extra_state`."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["ModuleStates"]


class ModuleStates:
    """Extra state of all modules that have any, by module name; one of the extras."""

    def __init__(self, model: nn.Module) -> None:
        """Find them; those that wrap others have none."""
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def __bool__(self) -> bool:
        return bool(self._modules)

    def state_dict(self) -> dict[str, Any]:
        """By name of the module."""
        return {name: module.get_extra_state() for name, module in self._modules.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises KeyError where a module has none in ``state``."""
        for name, module in self._modules.items():
            module.set_extra_state(state[name])
