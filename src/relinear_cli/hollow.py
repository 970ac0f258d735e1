"""Parts of relinear without the whole, which takes torch and transformers with it."""

import contextlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec


@contextlib.contextmanager
def hollow(*packages: str) -> Iterator[None]:
    """Within the block, modules inside of these packages are imported, and nothing that the packages import themselves.

    Packages that are imported already stay as they are. Afterwards they can be imported as ever.
    """
    new = [name for name in packages if name not in sys.modules]
    try:
        for name in new:
            sys.modules[name] = module_from_spec(find_spec(name))  # type: ignore[arg-type]
        yield
    finally:
        for name in new:
            sys.modules.pop(name, None)
