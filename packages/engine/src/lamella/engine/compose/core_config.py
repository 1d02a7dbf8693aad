"""What a core is built from. Imports nothing that reads text or speaks HTTP: the core's process has no use for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lamella.engine.config.schema import EngineOptions

CORE_FACTORY = "lamella.engine.compose.build:build_core_from_wire"


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """What a core is built from, in this process or in another."""

    options: EngineOptions
    model_path: str
    progress: bool

    def to_wire(self) -> dict[str, Any]:
        """As a msgpack value."""
        return {"options": asdict(self.options), "model_path": self.model_path, "progress": self.progress}

    @classmethod
    def from_wire(cls, value: dict[str, Any]) -> CoreConfig:
        """The reverse of to_wire."""
        return cls(EngineOptions(**value["options"]), value["model_path"], value["progress"])
