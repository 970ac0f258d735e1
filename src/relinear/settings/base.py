"""Settings that users write (recipes, command lines): pydantic models with readable errors."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from relinear.deprecated import with_attributes_of_0_2, with_new_keys, without_removed
from relinear.settings.messages import did_you_mean, quoted, validation_message

#: seed of random numbers: NumPy takes 32 bits
Seed = Annotated[int, Field(ge=0, lt=2**32)]
#: anything larger is a typo
PositiveInt = Annotated[int, Field(gt=0, le=10**12)]
#: sequences per batch; more would end the process for lack of memory, without a message
Batch = Annotated[int, Field(gt=0, le=2**20)]
#: CPU threads; a million would end the process without a message
Threads = Annotated[int, Field(gt=0, le=1024)]


def _refuse_repeated(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) != len(values):
        raise ValueError(f"values come twice: {list(values)}")
    return values


#: refuses a list with a repeated value
Unique = AfterValidator(_refuse_repeated)
#: patterns of module names; a single pattern may be a string
Patterns = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


def size_in_bytes(text: Any) -> float | None:
    """Parse a size such as ``90MB``, ``1.5GiB`` or ``1000`` into bytes; return None if it is not a size.

    k, M and G are thousands, Ki, Mi and Gi powers of 1,024.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(?:([kKMG]?)(i?)B)?\s*", str(text))
    if match is None:
        return None
    return float(match[1]) * (1024 if match[3] else 1000) ** ("", "K", "M", "G").index((match[2] or "").upper())


@with_attributes_of_0_2
class Settings(BaseModel):
    """Base of all user settings: frozen, without unknown keys, checked on creation.

    Wrong settings raise one ValueError with a line for each error, in which an unknown key names the nearest known one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError(f"{type(self).__name__}: {validation_message(error)}") from None

    # pydantic calls any other ``__init__`` for nested settings, too, whose errors would lose their location
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            values = with_new_keys(cls, values)
            unknown = [str(key) for key in values if key not in cls.model_fields]
            if unknown:
                errors = (f"unknown setting {quoted(key)}; {did_you_mean(key, cls.model_fields)}" for key in unknown)
                raise ValueError("; ".join(errors))
        return values

    @classmethod
    def load(cls, values: Mapping[str, Any] | Self, name: str = "settings", *, is_record: bool = False) -> Self:
        """Return checked settings from a mapping such as a parsed YAML file.

        Args:
            values: the mapping, or settings, which are returned.
            name: what the settings are, for messages.
            is_record: the settings were saved by this version or an earlier one, see ``Config.from_dict``.

        Raises:
            ValueError: with one line for each error; the message begins with ``name``, such as a file's name.
        """
        if isinstance(values, cls):
            return values
        if not isinstance(values, Mapping):
            raise ValueError(f"{name}: expected a mapping of settings, got {quoted(values)}")
        try:
            return cls.model_validate(dict(values), context={"is_record": is_record})
        except ValidationError as error:
            raise ValueError(f"{name}: {validation_message(error)}") from None

    @classmethod
    def upgraded(cls, saved: Any) -> Any:
        """Return settings saved by an earlier version (``model_dump(mode="json")``) as this version would save them.

        Missing settings take their defaults and removed settings are dropped, so that runs of different versions can be
        compared. Settings that this version cannot read are returned unchanged, so they equal no others.
        """
        try:
            return cls.load(without_removed(cls, saved), is_record=True).model_dump(mode="json")
        except ValueError:
            return saved

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some settings changed, checked again as a whole."""
        return self.load(self.model_dump(exclude_unset=True) | changes, type(self).__name__)
