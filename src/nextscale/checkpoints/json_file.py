"""JSON that anybody may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nextscale.errors import NextscaleError

MAX_BYTES = 64 * 2**20  # the index of the largest published model has a thousandth of it


def read_json(path: Path) -> Any:
    try:
        if not path.is_file():  # a pipe would be waited for
            raise NextscaleError(f"{path} is not a file")
        if path.stat().st_size > MAX_BYTES:
            raise NextscaleError(f"{path} is not readable JSON: it has more than {MAX_BYTES >> 20} MiB")
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise NextscaleError(f"{path} cannot be read: {error.strerror}") from None
    except NextscaleError:
        raise
    except RecursionError:
        raise NextscaleError(f"{path} is not readable JSON: it is nested too deeply") from None
    except ValueError as error:  # also text that is not UTF-8, and numbers of too many digits
        raise NextscaleError(f"{path} is not readable JSON: {error}") from None
