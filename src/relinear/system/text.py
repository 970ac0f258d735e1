"""What messages repeat of what they were given."""

from __future__ import annotations

__all__ = ["cut"]


def cut(text: str, most: int = 400) -> str:
    """``text`` without its middle where it is longer than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"
