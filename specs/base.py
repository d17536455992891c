"""What every spec has in common: frozen, closed, self-describing, and errors that a person can act on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvgroups.errors import SpecError

ITEM_SIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of one element, by dtype name."""


def _dtype_name(value: Any) -> str:
    name = str(value).removeprefix("torch.")
    if name not in ITEM_SIZE:
        raise ValueError(f"expected one of {', '.join(ITEM_SIZE)}")
    return name


Dtype = Annotated[str, BeforeValidator(_dtype_name)]
"""A dtype by name, "bfloat16"; a `torch.dtype` is taken too and stored by name."""


@contextmanager
def spec_errors(name: str) -> Iterator[None]:
    """Turn pydantic's report into one `SpecError` that names field, value and what would be right."""
    try:
        yield
    except ValidationError as error:
        items = error.errors()
        # What is wrong inside a field says more than what that makes of the field: "0 valid items in groups".
        outer = {item["loc"][:depth] for item in items for depth in range(len(item["loc"]))}
        sentences = [_sentence(name, item) for item in items if item["loc"] not in outer]
        raise SpecError("; ".join(sentences)) from None


def _sentence(name: str, item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    if isinstance(item.get("ctx", {}).get("error"), SpecError):
        return message  # a nested spec has said it all already
    field = f"{name}.{path}" if path else name
    if item["type"] == "union_tag_not_found":
        return f"{field}.kind: missing; this field is required"
    if item["type"] == "missing":
        return f"{field}: missing; this field is required"
    if item["type"] == "extra_forbidden":
        return f"{field}: unknown field, got {item['input']!r}; check the spelling"
    if not path:
        return f"{field}: {message}"
    return f"{field}: got {item['input']!r}; {message[0].lower()}{message[1:]}"


class SpecModel(BaseModel):
    """A frozen pydantic model that raises `SpecError` when it is built wrong."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, revalidate_instances="always"
    )

    def __init__(self, **data: Any) -> None:
        with spec_errors(type(self).__name__):
            super().__init__(**data)

    @classmethod
    def model_validate(cls, obj: Any, **kwargs: Any) -> Any:
        with spec_errors(cls.__name__):
            return super().model_validate(obj, **kwargs)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **kwargs: Any) -> Any:
        with spec_errors(cls.__name__):
            return super().model_validate_json(json_data, **kwargs)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed, and checked as if it had been built: pydantic's own checks nothing."""
        if not update:
            return super().model_copy(deep=deep)
        return type(self).model_validate({**dict(self), **update}).model_copy(deep=deep)


class BlockTensor(SpecModel):
    """One tensor that a block holds for one layer: its K, its V, or one recurrent state."""

    name: str
    """What the layer calls it: "key", "value", or the name of the state."""
    shape: tuple[Annotated[int, Field(ge=1)], ...]
    """Shape inside one block, without the block dimension."""
    dtype: Dtype
    """Element type by name."""

    @property
    def nbytes(self) -> int:
        """Bytes of this tensor in one block."""
        size = ITEM_SIZE[self.dtype]
        for dim in self.shape:
            size *= dim
        return size
