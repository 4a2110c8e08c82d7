"""Pillow, which reads and writes image files; it is optional."""

from types import ModuleType


def require_pillow(feature: str) -> ModuleType:
    """Return Pillow's Image module, or raise an error that says which feature needs it and how to install it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"{feature} needs Pillow: pip install 'tribe-tta[images]' (or pip install pillow)") from error
    return Image
