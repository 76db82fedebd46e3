"""Names that inputs and outputs have in a file, for a model that was read from one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InterfaceNames:
    """Names in the file.

    Attributes:
        inputs: The names of the inputs, in their order.
        outputs: The names of the outputs, in their order.
    """

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
