"""Everything stands in pyproject.toml but the package's long description, which is README.md for readers elsewhere."""

import re
from pathlib import Path

from setuptools import setup

LOCAL = r"(?!https?:|#)[^)\s]+"  # a link into the repository, which a package index does not have


def long_description() -> str:
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(rf"!\[[^\]]*\]\({LOCAL}\)\n*", "", text)
    return re.sub(rf"\[([^\]]+)\]\({LOCAL}\)", r"\1", text)


setup(long_description=long_description(), long_description_content_type="text/markdown")
