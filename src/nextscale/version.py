"""The version of this package; pyproject.toml reads it from here."""

__version__ = "0.1.0"


def installed_version(package: str) -> str | None:
    """Look up the version of an installed package; None if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
