"""The modules of a graph by path, and names for new ones."""

from torch import fx, nn


class ModuleTree:
    """The modules of the graph by path and paths by module, and names for new ones."""

    def __init__(self, root: fx.GraphModule) -> None:
        self.root = root
        self.modules = dict(root.named_modules())
        self.paths = {id(module): path for path, module in self.modules.items()}

    def add(self, name: str, module: nn.Module) -> str:
        free, number = name, 0
        while free in self.modules or hasattr(self.modules.get(free.rpartition(".")[0]), free.rpartition(".")[2]):
            number += 1
            free = f"{name}_{number}"
        self.root.add_submodule(free, module)
        self.modules[free] = module
        return free
