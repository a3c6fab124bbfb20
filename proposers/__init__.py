"""The methods: one file of this folder each, named as its `method` key. Imports no torch, so the schema may ask."""

import pkgutil


def available_methods() -> list[str]:
    """Names of the methods."""
    modules = pkgutil.iter_modules(__path__)
    return sorted(module.name for module in modules if module.name != "base" and not module.ispkg)
