"""find_override_matches: which operations the overrides of a config apply to."""

import torch
from torch import nn

from scalepoint import transform
from scalepoint.quantize import Override, QuantConfig, TensorQuantConfig, find_override_matches

FOUR = TensorQuantConfig(n_bits=4, per_channel=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x).relu().mean((2, 3))
        for block in self.blocks:
            x = block(x)  # a line of a block
        return self.head(x)


CONFIG = QuantConfig(
    overrides=(
        Override(type=nn.Linear, weight=FOUR),
        Override(name="blocks.*", weight="float", input="float"),
        Override(name="blocks.1", weight=FOUR),
        Override(name="no_such_layer", weight="float"),
    )
)


def test_each_override_lists_its_operations_with_their_lines_and_what_it_decides():
    matches = find_override_matches(CONFIG, Net().eval(), torch.randn(2, 3, 6, 6))
    by_type, by_glob, by_name, nothing = matches.overrides
    assert [row.name for row in by_type.operations] == ["blocks.0", "blocks.1", "head"]
    assert [row.decides for row in by_type.operations] == [(), (), ("weight",)]
    assert [(row.name, row.decides) for row in by_glob.operations] == [
        ("blocks.0", ("weight", "input")),
        ("blocks.1", ("input",)),
    ]
    assert [(row.name, row.decides) for row in by_name.operations] == [("blocks.1", ("weight",))]
    assert nothing.operations == ()
    assert all("a line of a block" in row.line and "test_override_matches.py" in row.line for row in by_glob.operations)
    text = str(matches)
    assert "0 operations" in text
    assert "self.head(x)" in text


def test_a_transformed_model_of_a_target_can_be_given():
    result = transform(Net().eval(), torch.randn(2, 3, 6, 6), target="onnxruntime")
    config = QuantConfig(overrides=[Override(type="conv", weight=FOUR)])
    (matches,) = find_override_matches(config, result).overrides
    assert [(row.name, row.kind, row.decides) for row in matches.operations] == [("stem", "conv", ("weight",))]
