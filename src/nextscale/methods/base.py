"""A method: a frozen dataclass whose fields are its configuration."""

from __future__ import annotations

import dataclasses
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from nextscale.errors import NextscaleError, choices
from nextscale.io.arguments import MAX_COUNT, read_count, read_flag, read_list, read_number, read_text, short_repr
from nextscale.io.reading import read_json
from nextscale.methods.package_data import stored, stored_names
from nextscale.methods.policy import Policy, PolicyContext

M = TypeVar("M", bound="Method")
SCHEMA = 1  # of stored methods and presets


@dataclass(frozen=True)
class Method(ABC):
    """What to leave out; `start` puts it to work on a call."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one sentence
    paper: ClassVar[str] = ""
    removed: ClassVar[tuple[str, ...]] = ()  # fields of earlier versions, which stored methods may still have

    def __post_init__(self) -> None:
        """Read fields by the kind that they are declared as; those who have ranges, too, check them behind this."""
        for f in dataclasses.fields(self):
            read = _READERS.get(getattr(f.type, "__name__", f.type))
            if read is not None:
                object.__setattr__(self, f.name, read(getattr(self, f.name), f"{self.name}: {f.name}"))

    @abstractmethod
    def start(self, context: PolicyContext) -> Policy: ...

    def begin(self, context: PolicyContext) -> Policy:
        """`start`, for those who run it."""
        policy = self.start(context)
        if not isinstance(policy, Policy):
            raise NextscaleError(f"{self.name}: start must return a Policy, not {short_repr(policy)}")
        policy.name = self.name
        return policy

    def without(self, *names: str) -> Hashable:
        """All settings but these."""
        return type(self), *(getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in names)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "fields": dataclasses.asdict(self)}

    @classmethod
    def from_fields(cls: type[M], fields: dict[str, Any]) -> M:
        known = [f.name for f in dataclasses.fields(cls)]
        fields = {name: value for name, value in fields.items() if name not in cls.removed}
        unknown = [name for name in fields if name not in known]
        if unknown:
            raise NextscaleError(f"{cls.name} has no field {unknown[0]!r}; allowed: {choices(known) or 'none'}")
        # JSON has no tuples.
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})

    @classmethod
    def preset(cls: type[M], name: str) -> M:
        """A stored configuration, by name or as a file."""
        path = stored(cls.name, name)
        if not os.path.isfile(path):
            have = stored_names(cls.name)
            raise NextscaleError(f"{cls.name} has no preset {name!r}; allowed: {choices(have) or 'none'}, or a file")
        content = read_stored(path)
        if content["name"] != cls.name:
            raise NextscaleError(f"{path} is a preset of {content['name']}, not of {cls.name}")
        if not isinstance(content.get("fields"), dict):
            raise NextscaleError(f"{path} is not a stored method: it needs 'name' and 'fields'")
        return cls.from_fields(content["fields"])

    def __add__(self, other: Method) -> Method:
        from nextscale.methods.compose import Compose

        return Compose((self, other))

    def require(self, name: str, low: float, high: float, *, above: bool = False, below: bool = False) -> None:
        """Check a field's range; `above` and `below` leave out the ends."""
        value = getattr(self, name)
        if not low <= value <= high or (above and value == low) or (below and value == high):
            interval = f"{'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}"
            raise NextscaleError(f"{self.name}: {name} must lie in {interval}, not {short_repr(value)}")

    def require_one_of(self, name: str, allowed: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise NextscaleError(f"{self.name}: {name} must be one of {choices(allowed)}, not {short_repr(value)}")


def _read_method(value: Any, name: str) -> Method:
    if not isinstance(value, Method):
        raise NextscaleError(f"{name} must be a method such as NOVA(), not {short_repr(value)}")
    return value


def _read_methods(value: Any, name: str) -> tuple[Method, ...]:
    return tuple(_read_method(v, name) for v in read_list(value, name, "a list of methods"))


# Of fields, by what they are declared as.
_READERS: dict[Any, Callable[[Any, str], Any]] = {
    "int": functools.partial(read_count, least=-MAX_COUNT),
    "float": read_number,
    "float | None": lambda value, name: None if value is None else read_number(value, name),
    "bool": read_flag,
    "str": read_text,
    "Method": _read_method,
    "tuple[Method, ...]": _read_methods,
}


def read_stored(path: Path) -> dict[str, Any]:
    """A method or preset in a JSON file."""
    return check_stored(read_json(path, "a stored method"), str(path))


def check_stored(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, dict) or "name" not in content:
        raise NextscaleError(f"{where} is not a stored method: it needs 'name' and 'fields'")
    if content.get("schema", SCHEMA) != SCHEMA:
        raise NextscaleError(f"{where} has schema {content['schema']!r}; this version reads {SCHEMA}")
    return content
