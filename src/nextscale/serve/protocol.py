"""The image API: a JSON body as a checked request, and what is answered."""

from __future__ import annotations

import base64
import functools
import io
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from PIL import Image, PngImagePlugin
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nextscale.errors import choices
from nextscale.io.arguments import short_repr
from nextscale.methods import METHODS
from nextscale.methods.naming import MAX_LENGTH
from nextscale.methods.package_data import stored_names
from nextscale.serve.errors import ApiError
from nextscale.serve.jobs import ALL, Finished, ImageJob, Preview
from nextscale.serve.served_model import ServedModel, Size
from nextscale.version import __version__

MAX_PROMPT = 32_000  # characters
MAX_LABEL = 256  # characters of what is only echoed, and of names
MAX_SEED = 2**63 - 1
MAX_DIGITS = 400  # of a number: reading a longer one takes time
RANDOM_SEEDS = 2**32  # short enough to be copied, and exact in JavaScript
QUALITY = 90  # of a lossy image, if none is asked for
QUALITIES = ("low", "medium", "high", "xhigh", "max", "auto", "standard", "hd")
NEW_QUALITIES = {"standard": "high", "hd": "xhigh"}  # the answer's types lack the old names
PNG_KEYWORD = "nextscale"

Label = Annotated[str | None, Field(max_length=MAX_LABEL, description=f"a text of at most {MAX_LABEL} characters")]
Flag = Annotated[bool | None, Field(description="true or false")]


class ImageRequest(BaseModel):
    """The body of POST /v1/images/generations. A field's description says what is allowed, errors included."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[
        str,
        Field(min_length=1, max_length=MAX_PROMPT, description=f"a text of 1 to {MAX_PROMPT} characters"),
    ]
    model: Annotated[str | None, Field(description="the name of a served model")] = None
    n: Annotated[int | None, Field(ge=1, le=10, description="a whole number from 1 to 10")] = None
    size: Annotated[str | None, Field(description='"auto" or one of the sizes of the model, such as "512x512"')] = None
    quality: Annotated[
        Literal["low", "medium", "high", "xhigh", "max", "auto", "standard", "hd"] | None,
        Field(description=choices(QUALITIES)),
    ] = None
    output_format: Annotated[Literal["png", "jpeg", "webp"] | None, Field(description="png, jpeg or webp")] = None
    output_compression: Annotated[
        int | None,
        Field(ge=0, le=100, description="a whole number from 0 to 100, and below 100 for jpeg and webp only"),
    ] = None
    background: Annotated[Literal["opaque", "auto"] | None, Field(description="opaque or auto")] = None
    response_format: Annotated[Literal["b64_json"] | None, Field(description="b64_json")] = None
    stream: Flag = None
    partial_images: Annotated[int | None, Field(ge=0, le=3, description="a whole number from 0 to 3")] = None
    user: Label = None
    safety_identifier: Label = None
    moderation: Label = None
    style: Label = None
    complexity: Label = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED, description=f"a whole number from 0 to {MAX_SEED}")] = None
    negative_prompt: Annotated[
        str | None, Field(max_length=MAX_PROMPT, description=f"a text of at most {MAX_PROMPT} characters")
    ] = None
    guidance_scale: Annotated[float | None, Field(allow_inf_nan=False, description="a finite number")] = None
    method: Annotated[
        str | None, Field(max_length=MAX_LENGTH, description='a method such as "nova:balanced", or "none"')
    ] = None
    previews: Annotated[Literal["all"] | None, Field(description='"all"')] = None


@dataclass(frozen=True)
class CheckedRequest:
    """A request of which the engine has a job to do, with all that its answers say."""

    job: ImageJob
    size: str
    quality: str
    output_format: str
    compression: int
    stream: bool
    safety_identifier: str | None
    warnings: list[str]  # sentences about what will not be as the client may expect

    @property
    def images(self) -> int:
        return len(self.job.seeds)


def read_request(body: bytes, models: Mapping[str, ServedModel], default_model: ServedModel) -> CheckedRequest:
    """Read a body; its first mistake is refused in one sentence."""
    asked = _validated(_parsed(body))
    model = _model(asked.model, models, default_model)
    width, height = _size(asked.size, model)
    if asked.previews is not None and not asked.stream:
        raise invalid("previews", 'previews "all" needs "stream": true')
    output_format = asked.output_format or "png"
    if output_format == "png" and asked.output_compression not in (None, 100):
        raise invalid("output_compression", "output_compression below 100 needs output_format jpeg or webp")
    n = asked.n or 1
    seed = secrets.randbelow(RANDOM_SEEDS) if asked.seed is None else asked.seed
    if seed + n - 1 > MAX_SEED:
        raise invalid("seed", f"the last of {n} images would have seed {seed + n - 1}; allowed: up to {MAX_SEED}")
    partial_images = asked.partial_images or 0
    job = ImageJob(
        model.name,
        _prompt(asked.prompt, model),
        tuple(range(seed, seed + n)),
        _method(asked, model, (width, height)),
        height,
        width,
        asked.negative_prompt,
        asked.guidance_scale,
        (asked.previews or partial_images) if asked.stream else 0,
    )
    quality = asked.quality or "auto"
    return CheckedRequest(
        job,
        f"{width}x{height}",
        NEW_QUALITIES.get(quality, quality),
        output_format,
        QUALITY if asked.output_compression is None else asked.output_compression,
        bool(asked.stream),
        asked.safety_identifier or asked.user or None,
        model.warnings(job),
    )


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(
            body.decode(), parse_constant=_not_a_number, parse_int=_whole_number, parse_float=_fraction
        )
    except UnicodeDecodeError:
        raise invalid(None, "the body must be JSON in UTF-8, and holds other bytes", "invalid_json") from None
    except RecursionError:
        raise invalid(None, "the body must be a JSON object, and is nested too deeply", "invalid_json") from None
    except ValueError as error:
        raise invalid(None, f"the body must be a JSON object: {error}", "invalid_json") from None
    if not isinstance(content, dict):
        raise invalid(None, f"the body must be a JSON object, not {short_repr(content)}", "invalid_json")
    return content


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits; allowed: {MAX_DIGITS}")
    return int(text)


def _fraction(text: str) -> float:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits; allowed: {MAX_DIGITS}")
    return float(text)


def _validated(content: dict[str, Any]) -> ImageRequest:
    fields = ImageRequest.model_fields
    if unknown := [name for name in content if name not in fields]:
        names = ", ".join(short_repr(name) for name in unknown[:5])
        message = f"unknown field{'s' if len(unknown) > 1 else ''} {names}; allowed: {choices(fields)}"
        raise invalid(short_repr(unknown[0]).strip("'\""), message, "unknown_parameter")
    try:
        return ImageRequest.model_validate(content)
    except ValidationError as error:
        name = str(error.errors(include_url=False, include_context=False, include_input=False)[0]["loc"][0])
    if name not in content:
        raise invalid(name, f"{name} is missing; it must be {fields[name].description}", "missing_required_parameter")
    given = content[name]
    shown = f"one of {len(given)} characters" if isinstance(given, str) and len(given) > 80 else short_repr(given)
    raise invalid(name, f"{name} must be {fields[name].description}, not {shown}")


def _model(name: str | None, models: Mapping[str, ServedModel], default_model: ServedModel) -> ServedModel:
    if name is None:
        return default_model
    if name not in models:
        raise unknown_model(name, models)
    return models[name]


def unknown_model(name: str, models: Mapping[str, ServedModel]) -> ApiError:
    message = f"the model {short_repr(name)} is not served here; allowed: {choices(models)}"
    return ApiError(404, message, code="model_not_found", param="model")


def _size(asked: str | None, model: ServedModel) -> tuple[int, int]:
    if asked in (None, "auto"):
        return model.default_size
    sizes = {size_name(size): size for size in model.sizes}
    if asked not in sizes:
        raise invalid("size", f"size {short_repr(asked)} is not one of {model.name}; allowed: auto, {choices(sizes)}")
    return sizes[asked]


def size_name(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _prompt(text: str, model: ServedModel) -> str | int:
    if not text.strip():
        raise invalid("prompt", "the prompt is empty")
    if not model.takes_labels:
        return text
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text):
        raise invalid("prompt", f"{model.name} takes the number of a class as its prompt, not {short_repr(text)}")
    return int(text)


def _method(asked: ImageRequest, model: ServedModel, size: Size) -> str:
    if asked.method is None:
        return model.method_of(asked.quality or "auto", size)
    if asked.quality is not None:
        raise invalid("method", "method and quality both choose a method; leave one of them out")
    refuse_files(asked.method)
    return asked.method


def refuse_files(method: str) -> None:
    """Refuse settings that could name a file: none is opened because a request says so."""
    named = []
    for piece in re.split("[;+()]", method):
        field, _, value = piece.rpartition("=")
        if field.strip().endswith("decision"):
            named.append(value)
        elif not field.strip().endswith("scale_table"):  # which reads names, and files that end in .json
            named.append(value.partition(":")[2])
    names = {name.strip(' "') for name in named} - stored_settings()
    is_path = "\\" in method or ".json" in method or re.search(r"/(?!\d)|(?<!\d)/", method)
    if is_path or not all(re.fullmatch(r"[-+]?[\d.]*(e-?\d+)?", name) for name in names):
        raise invalid("method", f"method {short_repr(method)} is not one with stored settings; see /v1/methods")


@functools.cache
def stored_settings() -> frozenset[str]:
    return frozenset(name for kind in (*METHODS, "decision") for name in stored_names(kind))


def completed(request: CheckedRequest, event: Finished, image: bytes) -> dict[str, Any]:
    """The event of a finished image."""
    extension = {
        "model": request.job.model,
        "seed": event.seed,
        "method": event.method,
        "tokens": event.tokens,
        "tokens_plain": event.tokens_plain,
        "seconds": round(event.seconds, 4),
        "queued": round(event.queued, 4),
        "warnings": request.warnings,
    }
    if event.scales is not None:
        extension["scales"] = [
            {"scale": s.scale, "grid": list(s.grid), "tokens": s.tokens, "computed": _base64(s.computed)}
            for s in event.scales
        ]
    return {
        "type": "image_generation.completed",
        **_shown(request, event.image_index, image),
        "usage": _usage([event]),
        **_safety(request),
        "nextscale": extension,
    }


def partial_image(request: CheckedRequest, event: Preview, image: bytes) -> dict[str, Any]:
    """The event of a preview."""
    content = {
        "type": "image_generation.partial_image",
        **_shown(request, event.image_index, image),
        "partial_image_index": event.index,
    }
    if request.job.previews == ALL:
        content["nextscale"] = {
            "scale": event.scale,
            "scales": event.scales,
            "grid": list(event.grid),
            "computed": None if event.computed is None else _base64(event.computed),
            "seconds": round(event.seconds, 4),
        }
    return content


def images_response(request: CheckedRequest, events: Sequence[Finished], images: Sequence[str]) -> dict[str, Any]:
    """The answer to a request that wanted no events; `images` in base64."""
    return {
        "created": int(time.time()),
        "data": [{"b64_json": image} for image in images],
        "background": "opaque",
        "output_format": request.output_format,
        "quality": "high" if request.quality == "auto" else request.quality,  # this type knows no "auto"
        "size": request.size,
        "usage": _usage(events),
        **_safety(request),
        "nextscale": {
            "model": request.job.model,
            "seeds": [event.seed for event in events],
            "method": events[0].method,
            "tokens": sum(event.tokens for event in events),
            "tokens_plain": sum(event.tokens_plain for event in events),
            "seconds": round(max(event.seconds for event in events), 4),
            "queued": round(max(event.queued for event in events), 4),
            "warnings": request.warnings,
        },
    }


def _shown(request: CheckedRequest, image_index: int, image: bytes) -> dict[str, Any]:
    return {
        "b64_json": base64.b64encode(image).decode("ascii"),
        "created_at": int(time.time()),
        "size": request.size,
        "quality": request.quality,
        "background": "opaque",
        "output_format": request.output_format,
        **({"image_index": image_index} if request.images > 1 else {}),
    }


def _safety(request: CheckedRequest) -> dict[str, str]:
    return {} if request.safety_identifier is None else {"safety_identifier": request.safety_identifier}


def _usage(events: Sequence[Finished]) -> dict[str, Any]:
    text, made = events[0].text_tokens, sum(event.tokens for event in events)
    return {
        "input_tokens": text,
        "input_tokens_details": {"text_tokens": text, "image_tokens": 0},
        "output_tokens": made,
        "total_tokens": text + made,
    }


def _base64(cells: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(cells, dtype=np.uint8).tobytes()).decode("ascii")


def encode(request: CheckedRequest, event: Finished | Preview) -> bytes:
    """The image as a file. The same image and settings give the same bytes."""
    image, file = Image.fromarray(event.pixels()), io.BytesIO()
    if request.output_format != "png":
        image.save(file, request.output_format, quality=max(1, request.compression))
    elif isinstance(event, Preview):
        image.save(file, "png", compress_level=1)
    else:
        image.save(file, "png", pnginfo=_settings(request, event))
    return file.getvalue()


def _settings(request: CheckedRequest, event: Finished) -> PngImagePlugin.PngInfo:
    """What made the image, for whoever finds the file."""
    content = {
        "nextscale": __version__,
        "model": request.job.model,
        "prompt": request.job.prompt,
        "negative_prompt": request.job.negative_prompt,
        "seed": event.seed,
        "size": request.size,
        "method": event.method,
        "guidance_scale": request.job.guidance_scale,
    }
    info = PngImagePlugin.PngInfo()
    info.add_itxt(PNG_KEYWORD, json.dumps({name: value for name, value in content.items() if value is not None}))
    return info
