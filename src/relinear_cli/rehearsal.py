"""Commands are tried without torch and transformers first, so that wrong input is refused in under a second.

Importing both takes seconds, and few checks of what a user gave need them. A forked process carries out the command
with placeholders for them. It ends at the first use of a placeholder, and at whatever would write, start or change
something. The command is then carried out as if nothing had been tried. An error of the user's before is the answer.
"""

import importlib.abc
import importlib.machinery
import os
import stat
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

from relinear_cli.errors import TRACEBACK_VARIABLE, is_user_error, one_message

#: what takes long to import, and the module of ours that changes functions of transformers
_PLACEHOLDERS = ("torch", "transformers", "peft", "safetensors", "scipy", "accelerate", "triton", "tokenizers")
_PATCHES = "relinear.surgery.wrapped"
#: audited events that change nothing; of the others those that begin with one of ``_EFFECTS`` end the rehearsal
_HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.getxattr", "os.listxattr", "os.putenv", "os.unsetenv")
_EFFECTS = ("os.", "shutil.", "subprocess.", "tempfile.", "sqlite3.", "fcntl.", "_thread.", "pty.")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Unknown(BaseException):
    """What comes next needs a library that is not there, or has an effect. No ``except Exception`` takes it."""


def refusal(work: Callable[[], Any]) -> str | None:
    """Return the message of the error that ``work`` ends in, if that takes neither torch nor any effect; else None."""
    skipped = ("torch" in sys.modules, "relinear" in sys.modules, not hasattr(os, "fork"))
    # modules that the user names may do anything as they are imported
    if any(skipped) or os.environ.get("RELINEAR_IMPORT") or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
        return None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            message = _rehearsed(work).encode("utf-8", "replace")
            while message:
                message = message[os.write(writing, message) :]
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    return message.decode("utf-8") or None


def rehearsing() -> bool:
    """Return whether this process is one that computes nothing."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _rehearsed(work: Callable[[], Any]) -> str:
    """Carry out ``work`` with placeholders, in its own process; return its error's message, "" where there is none."""
    silent = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(silent, standard)
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, _Finder())
    metadata.EntryPoint.load = _stop  # type: ignore[method-assign]  # other packages' operators need what is not there
    sys.addaudithook(_watch)
    try:
        work()
    except Exception as error:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_name == "<module>":
                return ""  # a module could not be imported as it is
            trace = trace.tb_next
        if is_user_error(error) and not isinstance(error, ImportError):
            return one_message(error)
    return ""


def _stop(*_: Any, **__: Any) -> Any:
    raise _Unknown


def _watch(event: str, args: tuple) -> None:
    if event == "open":
        path, _, flags = args
        if isinstance(path, int) or flags & _WRITING:
            raise _Unknown
        try:
            mode = os.stat(path).st_mode
        except OSError:
            return
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode) and path != os.devnull:  # what is read from a pipe is gone
            raise _Unknown
    elif event.startswith(_EFFECTS) and event not in _HARMLESS:
        raise _Unknown


def _placeholder(*_: Any, **__: Any) -> Any:
    """Return a placeholder where a module is being imported, which may do with it what it likes; else stop."""
    frame: Any = sys._getframe(1)
    while frame.f_code is not _rehearsed.__code__:
        if frame.f_code.co_name == "<module>":
            return _Meta("Placeholder", (), {})
        frame = frame.f_back
    raise _Unknown


def _attribute(self: Any, name: str) -> Any:
    found = _placeholder()
    if name.startswith("__"):
        raise AttributeError(name)
    return found


class _Meta(type):
    """Type of placeholders: classes, so that others can be derived from them, and annotations can name them."""

    __getattr__ = _attribute

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __instancecheck__(cls, instance: Any) -> bool:
        return _placeholder() is None

    __call__ = __getitem__ = __subclasscheck__ = _placeholder
    __lt__ = __le__ = __gt__ = __ge__ = __iter__ = __neg__ = __enter__ = __exit__ = _placeholder


class _Module(ModuleType):
    __path__: Any = ()
    __getattr__ = _attribute


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in _PLACEHOLDERS or name == _PATCHES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
