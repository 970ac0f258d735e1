"""Define ``DataSettings``: which text, tokenizer and sequence length a command uses."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from relinear.data.tasks import task_of
from relinear.data.tokenizers import check_tokenizer_name
from relinear.settings.base import Settings
from relinear.settings.messages import quoted


class DataSettings(Settings):
    """Settings of text: corpus, tokenizer, lengths. Unknown keys and values out of range are errors.

    Attributes:
        data: ``stdlib``, a file, folder or pattern, a Hub name, or a synthetic task. ``stdlib`` is the source text of
            Python's standard library. Files are txt, md, json, jsonl, csv, tsv, parquet or arrow, also compressed. Hub
            names are ``owner/name`` or ``owner/name:config``. Tasks are ``cgt-arithmetic:...``, ``cgt-regression:...``
            and ``cgt-mixture:of=DATA+DATA``, with settings such as ``cgt-arithmetic:digits=1,a=[0,5]``
            (``relinear.data.tasks``). The first two determine ``tokenizer`` and ``sequence_length``.
        text_column: column of tables and Hub data; by default ``text``, or the only column of strings.
        tokenizer: ``bytes``, ``bpe:N``, or an AutoTokenizer name. ``bpe:N``, of N entries, is trained on the
            training split.
        sequence_length: tokens per block.
        validation_fraction: share of the characters held out for validation if the corpus has no such split.
        max_documents: read only the first documents of each split of the source; Hub data are then streamed.
        max_validation_tokens: evaluate on the first tokens of the validation split only (whole blocks).
        cache_dir: folder of tokenised data; by default ``$RELINEAR_CACHE``, else ``~/.cache/relinear``.
        seed: determines which documents are held out.
    """

    data: str = Field(default="stdlib", min_length=1)
    text_column: str | None = None
    tokenizer: Annotated[str, AfterValidator(check_tokenizer_name)] = "bytes"
    sequence_length: int = Field(default=256, ge=2)
    validation_fraction: float = Field(default=0.05, gt=0, le=0.5)
    max_documents: int | None = Field(default=None, ge=1)
    max_validation_tokens: int | None = Field(default=None, ge=2)
    cache_dir: Path | None = None
    seed: int = 0

    @model_validator(mode="after")
    def _with_task_defaults(self) -> Self:
        task = task_of(self.data)
        defaults = {} if task is None else task.defaults()
        for key, value in defaults.items():
            if key in self.model_fields_set and getattr(self, key) != value:
                raise ValueError(f"{key} is {value!r} for this task, got {quoted(getattr(self, key))}; omit it")
        self.__dict__.update(defaults)
        self.model_fields_set.difference_update(defaults)  # so that ``replace`` with another text omits them
        return self
