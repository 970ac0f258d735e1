"""Frozen configs that are serialised by kind, with one registry for each family: operators, attachments, objectives.

Only plain JSON values, tuples and nested configs are allowed as fields, so that a config can be written into a
checkpoint's ``config.json`` and read back without running any code. ``settings.base`` is for the other kind of
settings: what a user writes for a command.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin

from pydantic import ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError

from relinear.contract import plugins
from relinear.settings.config_text import keeps_layer, parse_config_text
from relinear.settings.messages import did_you_mean, quoted, validation_message

_REGISTRY: dict[str, dict[str, type[Config]]] = {}
#: registered class -> its settings' annotations by name
_ANNOTATIONS: dict[type[Config], dict[str, Any]] = {}
C = TypeVar("C", bound="type[Config]")

#: torch cannot count the bytes of a float64 matrix with larger sides
_MAX_SIZE = 2**29
#: layers inside one operator: building more would take minutes
MAX_LAYERS = 1_000


def IntRange(minimum: int, maximum: int = _MAX_SIZE) -> Any:
    """Return the range of an integer setting, for ``Annotated[int, IntRange(1)]``."""
    return Field(ge=minimum, le=maximum)


Count = Annotated[int, IntRange(1)]
NonNegative = Annotated[float, Field(ge=0)]


class UnknownSettingError(ValueError, TypeError):
    """Raised for an unknown setting: a ValueError where settings are read, a TypeError for a keyword argument."""


class UnknownKindError(ValueError):
    """Raised for a kind that is not registered and that no installed package offers."""


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def register(cls: C) -> C:
    """Register a config under its ``kind``, and make it a frozen, keyword-only dataclass unless it is a dataclass.

    Args:
        cls: a subclass of ``OperatorConfig``, ``AttachmentConfig`` or ``ObjectiveConfig`` with a class variable
            ``kind``.

    Returns:
        ``cls`` itself, so that ``register`` serves as a decorator.

    Raises:
        ValueError: if ``cls`` is not a config class with a ``family`` and a ``kind``, the kind is taken or no word, or
            a setting's annotation names what does not exist or what JSON cannot hold.

    Examples:
        >>> @relinear.register
        ... class Mine(relinear.LowRank):
        ...     kind = "mine"
        ...     size: int = 4
        >>> relinear.OperatorConfig.read("mine")
        Mine(rank=64, size=4)
    """
    if not (isinstance(cls, type) and issubclass(cls, Config)):
        expected = "a subclass of OperatorConfig, AttachmentConfig or ObjectiveConfig"
        raise ValueError(f"register takes {expected}, got {quoted(cls)}")
    for name in ("family", "kind"):
        if not isinstance(getattr(cls, name, None), str):
            raise ValueError(f"register: {cls.__name__} needs a class variable {name}, a string")
    if not cls.kind.isidentifier() or keeps_layer(cls.kind):
        raise ValueError(f"register: the kind {quoted(cls.kind)} cannot be written on a command line; choose a word")
    cls.check_class()
    if "__dataclass_fields__" not in vars(cls):
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    annotations = _annotations(cls, sys._getframe(1).f_locals)
    registry = _REGISTRY.setdefault(cls.family, {})
    other = registry.get(cls.kind, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):  # else a notebook's cell ran again
        raise ValueError(f"{cls.family} kind {cls.kind!r} is already registered by {other.__qualname__}")
    registry[cls.kind] = cls
    _ANNOTATIONS[cls] = annotations
    return cls


def _annotations(cls: type[Config], local_names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the annotations of a config's settings; ``local_names`` are those of the function that defines it."""
    annotations: dict[str, Any] = {}
    settings = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for base in reversed(cls.__mro__):
        names = {**local_names, cls.__name__: cls} if base.__module__ == cls.__module__ else None
        for name, annotation in vars(base).get("__annotations__", {}).items():
            if name not in settings:
                if get_origin(annotation) is not ClassVar and not str(annotation).startswith(("ClassVar", "typing.C")):
                    what = f"{base.__name__}.{name} is no setting of {cls.__name__}"
                    raise ValueError(f"register: {what}; make {base.__name__} a dataclass (frozen=True, kw_only=True)")
                continue
            if any(callable(vars(other).get(name)) for other in base.__mro__[1:]):
                raise ValueError(f"register: the setting {cls.__name__}.{name} hides a method; choose another name")
            one = type(base.__name__, (), {"__annotations__": {name: annotation}, "__module__": base.__module__})
            try:
                annotations |= typing.get_type_hints(one, localns=names, include_extras=True)
            except NameError as error:
                advice = f"{error}; import it at runtime, not under TYPE_CHECKING"
                raise ValueError(f"register: the annotation of {cls.__name__}.{name}: {advice}") from None
            if get_origin(annotations[name]) is ClassVar:
                raise ValueError(f"register: {cls.__name__}.{name} is no setting; write `{name} = ...`, unannotated")
            if not _is_json(annotations[name]):
                advice = "annotate it as bool, int, float, str, Literal, a tuple (not a list) or a config of these"
                raise ValueError(f"register: {cls.__name__}.{name} cannot be read back from JSON; {advice}")
    return annotations


def _is_json(annotation: Any) -> bool:
    """Return whether ``to_dict`` can write the values of a setting and ``from_dict`` read them back."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _is_json(arguments[0])
    if origin in (tuple, typing.Union, UnionType):
        return all(argument is Ellipsis or _is_json(argument) for argument in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return True
    return origin is Literal or annotation in (bool, int, float, str, tuple, NoneType, Any)


def worker_environment() -> dict[str, str]:
    """Return environment variables that make a new process import every kind registered here."""
    return plugins.environment(cls for kinds in _REGISTRY.values() for cls in kinds.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of operators', attachments' and objectives' settings; ``register`` makes a subclass a frozen dataclass.

    pydantic checks values by the annotations of fields, in strict mode: ``int``, ``Literal``, ``Count``,
    ``tuple[float, ...]``, ``Annotated[float, pydantic.Field(gt=0, lt=1)]``, and any of these or None.

    Attributes:
        family: "operator", "attachment", "objective" or "task"; set by the base class of the family.
        kind: name in the family.
        legacy_defaults: setting -> its value in records of versions that did not have it, if not today's default.
    """

    family: ClassVar[str]
    kind: ClassVar[str]
    legacy_defaults: ClassVar[Mapping[str, Any]] = {}

    def __new__(cls, *args: Any, **values: Any) -> Self:
        if cls not in _ANNOTATIONS:
            raise ValueError(f"{cls.__name__} is not registered: decorate it with @relinear.register")
        if args:
            raise UnknownSettingError(f"{cls.__name__} takes its settings by name, got {quoted(args[0])}")
        names = sorted(field.name for field in dataclasses.fields(cls))
        for key in values:
            if key not in names:
                hint = did_you_mean(str(key), names)
                raise UnknownSettingError(f"{cls.__name__}: unknown setting {quoted(key)}; {hint}")
        return super().__new__(cls)

    @classmethod
    def check_class(cls) -> None:
        """Raise ValueError if the class lacks what its family needs; ``register`` calls this."""

    def __post_init__(self) -> None:
        """Check every setting against its annotation; a subclass with further checks calls this first."""
        for name, annotation in _ANNOTATIONS[type(self)].items():
            value = _lists_as_tuples(getattr(self, name))
            object.__setattr__(self, name, value)
            check_value(name, value, annotation)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as JSON values for ``from_dict``, with every field, so that defaults may change."""
        return {"kind": self.kind} | {f.name: _encode(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, is_record: bool = False) -> Self:
        """Return the config that a mapping with a ``kind`` describes; missing settings take their defaults.

        Args:
            values: ``kind`` and settings.
            is_record: ``to_dict`` of this version or an earlier one wrote ``values``, into a checkpoint or a record of
                a run: settings that the earlier version did not have take their value in ``legacy_defaults``.

        Raises:
            ValueError: on an unknown kind, an unknown key or a bad value.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"expected {cls.family} settings, as text or with a 'kind', got {quoted(values)}")
        config = _config_from(cls.family, values, is_record)
        if not isinstance(config, cls):
            raise ValueError(f"{config.kind!r} is not a {cls.__name__}")
        return config

    @classmethod
    def read(cls, config: Self | str | Mapping[str, Any], *, is_record: bool = False) -> Self:
        """Return a config from text of the command line or from a mapping, as ``from_dict``; a config is returned.

        Raises:
            ValueError: as ``parse_config_text`` and ``from_dict``.
        """
        if isinstance(config, str):
            return cls.from_dict(parse_config_text(config))
        return config if isinstance(config, cls) else cls.from_dict(config, is_record=is_record)  # type: ignore

    @classmethod
    def kinds(cls) -> dict[str, type[Config]]:
        """Return every registered config class of this family, by kind."""
        return dict(_REGISTRY.get(cls.family, {}))

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed (and checked again)."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        """Show the integer settings (ranks, blocks), which define the size, and all that differ from their defaults."""
        values = {f: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields = [f for f, v in values.items() if (type(v) is int and f.name != "seed") or _is_changed(self, f)]
        shown = (f"{f.name}={values[f] if isinstance(values[f], Config) else repr(values[f])}" for f in fields)
        return f"{type(self).__name__}({', '.join(shown)})"


def _is_changed(config: Config, field: dataclasses.Field) -> bool:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return bool(getattr(config, field.name) != default)


def _encode(value: Any) -> Any:
    if isinstance(value, Config):
        return {"family": value.family} | value.to_dict()
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a config field may not hold {type(value).__name__}: {value!r}")


def _config_from(family: str, values: Mapping[str, Any], is_record: bool) -> Config:
    """Return the config of any kind of ``family``; see ``Config.from_dict``."""
    values = dict(values)
    kind = values.pop("kind", None)
    if isinstance(kind, str) and kind not in _REGISTRY.get(family, {}):
        plugins.load(family, kind)
    known = _REGISTRY.get(family, {})
    if not isinstance(kind, str) or kind not in known:
        names = {**known, **plugins.entry_points(family)}
        hint = f"{did_you_mean(str(kind), names)} (relinear list {family}s shows all)"
        raise UnknownKindError(f"unknown {family} kind {quoted(kind)}; {hint}")
    target = known[kind]
    fields, annotations = dataclasses.fields(target), _ANNOTATIONS[target]  # type: ignore[arg-type]
    texts = {f.name for f in fields if isinstance(f.default, str) and NoneType not in get_args(annotations[f.name])}
    values |= {key: "none" for key in texts if key in values and values[key] is None}  # YAML reads none as null
    settings = dict(target.legacy_defaults) if is_record else {}
    settings |= {str(key): _decode(value, is_record) for key, value in values.items()}
    required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in settings]
    if missing:
        raise ValueError(f"{kind}: the setting {' and '.join(missing)} is missing")
    return target(**settings)


def _decode(value: Any, is_record: bool) -> Any:
    if isinstance(value, Mapping):
        value = dict(value)
        family = value.pop("family", "operator")
        if not isinstance(family, str) or family not in _REGISTRY:
            raise ValueError(f"unknown config family {quoted(family)}; {did_you_mean(str(family), _REGISTRY)}")
        return _config_from(family, value, is_record)
    if isinstance(value, list):
        return tuple(_decode(item, is_record) for item in value)
    return value


def _lists_as_tuples(value: Any) -> Any:
    return tuple(map(_lists_as_tuples, value)) if isinstance(value, list) else value


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError unless ``value``, called ``name``, is what the annotation ``hint`` allows."""
    try:
        _adapter(hint).validate_python(value)
    except ValidationError as error:
        raise ValueError(validation_message(error, name)) from None


@functools.cache
def _adapter(hint: Any) -> TypeAdapter:
    strict = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    return TypeAdapter(InstanceOf[hint] if dataclasses.is_dataclass(hint) else hint, config=strict)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    check_value(name, value, Literal.__getitem__(tuple(choices)))


def check_fits(name: str, value: int, in_features: int, out_features: int) -> None:
    """Raise ValueError if ``value``, a rank or a number of blocks, exceeds the smaller side of a layer."""
    limit = min(in_features, out_features)
    if value > limit:
        raise ValueError(f"{name}={value} exceeds min({in_features=}, {out_features=}); choose at most {limit}")


def check_divides(name: str, value: int, **sizes: int) -> None:
    """Raise ValueError unless ``value`` divides every size; the error lists the values that do."""
    if value < 1 or any(size % value for size in sizes.values()):
        possible = [k for k in range(1, min(sizes.values()) + 1) if not any(size % k for size in sizes.values())]
        listed = ", ".join(f"{key}={size}" for key, size in sizes.items())
        raise ValueError(f"{name}={value} does not divide {listed}; possible values: {', '.join(map(str, possible))}")
