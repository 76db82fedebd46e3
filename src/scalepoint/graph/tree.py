"""An index of a graph's modules, and free names for new ones."""

from torch import fx, nn


class ModuleTree:
    """The modules of a graph by path, and the paths by id of the module."""

    def __init__(self, root: fx.GraphModule) -> None:
        self.root = root
        self.modules = dict(root.named_modules())
        self.paths = {id(module): path for path, module in self.modules.items()}

    def add(self, name: str, module: nn.Module) -> str:
        """Add a module under this name, with a number behind it if the name is in use; return the name."""
        free_name, number = name, 0
        while self._is_used(free_name):
            number += 1
            free_name = f"{name}_{number}"
        self.root.add_submodule(free_name, module)
        self.modules[free_name] = module
        return free_name

    def _is_used(self, name: str) -> bool:
        parent, _, attribute = name.rpartition(".")
        return name in self.modules or hasattr(self.modules.get(parent), attribute)
