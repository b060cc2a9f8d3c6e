"""Bad input of many kinds; see `__main__.py`."""
