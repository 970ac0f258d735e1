"""What tests of pages share."""

import re


def without_plotly(page: str) -> str:
    """A page less plotly's own script, which names addresses that it never fetches."""
    return re.sub(r'<script id="plotly">.*?</script>\n', "", page, flags=re.DOTALL)
