"""DeployConfig: everything deploy can be told, as a file: flag of the command line = key here = keyword of deploy."""

from pathlib import Path
from typing import Any, Self

from scalepoint.documents import MAX_BYTES, dump_yaml, parse_json, parse_yaml
from scalepoint.errors import ConfigError, DocumentError
from scalepoint.files import replace_text
from scalepoint.quantize.config import Config, QuantConfig
from scalepoint.spec.spec import SchemaGenerator


class DeployConfig(Config):
    """What to deploy, for what, and how well it must do."""

    model: str | None = None  # package.module:factory
    data: str | None = None
    target: str = "onnxruntime"
    output: str = "out"
    evaluate: str | None = None  # package.module:function
    max_drop: float | None = None
    max_trials: int = 6
    max_batches: int | None = None
    leave: tuple[str, ...] = ()
    strict: bool = False
    threads: int = 1
    quantization: QuantConfig = QuantConfig()

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read YAML or JSON, by the ending of the name."""
        path = Path(path)
        try:
            if path.stat().st_size > MAX_BYTES:
                raise DocumentError(f"{path}: more than {MAX_BYTES} bytes, too large for a config")
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise DocumentError(f"{path} cannot be read: {error}") from error
        data = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
        if not isinstance(data, dict):
            raise DocumentError(f"{path}: a config is a mapping of keys, not {type(data).__name__}")
        try:
            return cls.model_validate(data)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_file(self, path: str | Path) -> None:
        path = Path(path)
        fields = self.to_dict()
        replace_text(path, self.model_dump_json(indent=2) if path.suffix == ".json" else dump_yaml(fields))

    def to_dict(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json", exclude={"quantization"}), "quantization": self.quantization.to_dict()}

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """JSON Schema, for editors that complete config files."""
        return super().model_json_schema(*args, **{"schema_generator": SchemaGenerator, **kwargs})
