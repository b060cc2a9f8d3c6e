"""Names that users write down, as public_names.json lists them: more may come, none may go or change its default."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

import nextscale
from nextscale.cli import app
from nextscale.methods import METHODS, Method

ROOT = Path(__file__).parents[2]
KNOWN = json.loads(Path(__file__).with_name("public_names.json").read_text())
CALLS = ("__init__", "from_pretrained", "__call__", "warm_up", "estimate", "to", "schedule")


def defaults(function: Any) -> dict[str, str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: "" if p.default is p.empty else repr(p.default) for p in parameters if p.name != "self"}


def fields(method: type[Method]) -> dict[str, str]:
    given = dataclasses.fields(method)
    return {f.name: "" if f.default is dataclasses.MISSING else repr(f.default) for f in given}


def options(command: Any, path: str = "") -> dict[str, list[str]]:
    """Of every command: its arguments, options and switches."""
    found = {path.strip(): sorted(o for p in command.params for o in (*p.opts, *p.secondary_opts))}
    for name, child in getattr(command, "commands", {}).items():
        found |= options(child, f"{path} {name}")
    return found


def properties(schema: Any) -> set[str]:
    """The keys of all objects in a JSON schema."""
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    named = schema.get("properties", {}) if isinstance(schema, dict) else {}
    return set(named).union(*map(properties, inner))


def current() -> dict[str, Any]:
    package = ROOT / "src" / "nextscale"
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    schema = json.loads((package / "trace.schema.json").read_text())
    return {
        "names": sorted(nextscale.__all__),
        "pipeline": sorted(name for name in dir(nextscale.Pipeline) if name[0] != "_"),
        "calls": {name: defaults(getattr(nextscale.Pipeline, name)) for name in CALLS},
        "verify": defaults(nextscale.verify),
        "from_official": defaults(nextscale.from_official),
        "output": sorted(f.name for f in dataclasses.fields(nextscale.Output)),
        "scale_end": sorted(f.name for f in dataclasses.fields(nextscale.ScaleEnd)),
        "methods": {name: fields(method) for name, method in METHODS.items()},
        "presets": sorted(path.stem for path in (package / "methods" / "presets").glob("*.json")),
        "models": sorted(nextscale.MODELS),
        "commands": options(typer.main.get_command(app)),
        "extras": sorted(re.findall(r"^(\w+) = ", extras, re.MULTILINE)),
        "trace": {name: sorted(properties(entry)) for name, entry in {"": schema, **schema["$defs"]}.items()},
    }


def missing(known: Any, now: Any, where: str) -> list[str]:
    if isinstance(known, dict) and isinstance(now, dict):
        gone = [f"{where}.{key}" for key in known if key not in now]
        return gone + [name for key in known if key in now for name in missing(known[key], now[key], f"{where}.{key}")]
    if isinstance(known, list):
        return [f"{where}.{name}" for name in known if name not in now]
    return [] if known == now else [f"{where} = {now}, not {known}"]


@pytest.mark.parametrize("section", KNOWN)
def test_no_public_name_is_gone(section: str) -> None:
    assert not missing(KNOWN[section], current()[section], section)
