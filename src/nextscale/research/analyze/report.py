"""All figures of an analysis on one page that needs no other file and no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from nextscale.io.writing import atomic_write
from nextscale.research.analyze.figures import Figure
from nextscale.research.analyze.style import quoted
from nextscale.version import __version__

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 960px; margin: 2rem auto;
  padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.5rem; }}
table {{ border-collapse: collapse; }} th, td {{ text-align: left; padding: .1rem 1rem .1rem 0; vertical-align: top; }}
th {{ font-weight: 600; white-space: nowrap; }}
figure {{ margin: 0; }} img {{ max-width: 100%; height: auto; }} figcaption {{ color: #444; }}
a {{ color: #0072b2; }}
</style>
</head>
<body>
<h1>{title}</h1>
<table>
{facts}
</table>
<nav><ol>
{contents}
</ol></nav>
{figures}
</body>
</html>
"""
FIGURE = """<section id="{name}">
<h2>{title} <small>({paper})</small></h2>
<figure>
<img src="data:image/png;base64,{image}" alt="{title}">
<figcaption>{caption} Data: {data}.</figcaption>
</figure>
</section>
"""


def write_report(
    path: Path, model: str, prompt: str | int, facts: Mapping[str, Any], figures: Mapping[Path, tuple[Figure, Path]]
) -> None:
    """Write the page; `figures` maps each image to its figure and the file of its data."""
    rows = {"prompt": quoted(prompt, 400), **facts, "made by": f"nextscale {__version__}"}
    page = PAGE.format(
        title=escape(f"{model}: {quoted(prompt)}"),
        facts="\n".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in rows.items()),
        contents="\n".join(f'<li><a href="#{f.name}">{escape(f.title)}</a></li>' for f, _ in figures.values()),
        figures="".join(
            FIGURE.format(
                name=f.name,
                title=escape(f.title),
                paper=escape(f.paper),
                caption=escape(f.caption),
                data=escape(data.name),
                image=base64.b64encode(image_path.read_bytes()).decode(),
            )
            for image_path, (f, data) in figures.items()
        ),
    )
    with atomic_write(path) as file:
        file.write(page.encode())
