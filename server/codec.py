"""Dataclasses to msgpack and back, strictly typed: the wire format of `server/messages.py`.

A message is the map `{"v": version, "t": type, ...fields}`. A field that holds its default is left
out, a nested dataclass is a map without "v" and "t", and a mapping is a list of [key, value] pairs,
so that every key on the wire is a string. The field types of a class are read once; encoding costs
one attribute fetch and one comparison per field.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from whalepod.server.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    MessageError,
    ToEngine,
    ToGateway,
)

T = TypeVar("T")
Decoder = Callable[[Any], Any]
Shape = tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]], tuple[Any, ...], tuple[str, ...]]
"""Names of the fields, a getter of all of them, their defaults, and those that are mappings."""
MESSAGE_TYPES: Mapping[str, type] = {
    cls.__name__: cls for cls in (*get_args(ToEngine), *get_args(ToGateway))
}
_REQUIRED: Any = object()
_INT64 = range(-(2**63), 2**63)


class Encoder:
    """Makes frames in memory that it keeps: one for each thread that sends."""

    def __init__(self) -> None:
        self._pack = msgpack.Packer(default=_plain).pack

    def encode(self, message: ToEngine | ToGateway) -> bytes:
        """Return the frame of a message. MessageError when it would be over MAX_MESSAGE_BYTES."""
        return self.encode_map(
            _to_map(message) | {"v": PROTOCOL_VERSION, "t": type(message).__name__}
        )

    def encode_map(self, row: dict[str, Any]) -> bytes:
        """Return the frame of a map."""
        frame: bytes = self._pack(row)
        if len(frame) > MAX_MESSAGE_BYTES:
            raise MessageError(
                f"message of {len(frame)} bytes, at most {MAX_MESSAGE_BYTES} may travel"
            )
        return frame


def encode(message: ToEngine | ToGateway) -> bytes:
    """Return the frame of a message that is sent now and then; as `Encoder.encode`."""
    return Encoder().encode(message)


def decode(frame: bytes | memoryview) -> ToEngine | ToGateway:
    """Return the message of a frame. MessageError that names what is wrong with it."""
    raw = _unpack(frame)
    version, name = raw.get("v"), raw.get("t")
    if version != PROTOCOL_VERSION:
        raise MessageError(f"protocol version {version!r}, expected {PROTOCOL_VERSION}")
    cls = MESSAGE_TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise MessageError(f"unknown message type {str(name)[:64]!r}")
    message: ToEngine | ToGateway = _decoder_of_class(cls)(raw)
    return message


def encode_value(value: Any) -> bytes:
    """Return a dataclass that is no message (a config) in the same form, without version."""
    return Encoder().encode_map(_to_map(value))


def decode_value(cls: type[T], frame: bytes | memoryview) -> T:
    """Return the dataclass `cls` from `encode_value`'s bytes, as strict as `decode`."""
    value: T = _decoder_of_class(cls)(_unpack(frame))
    return value


# -- bytes --------------------------------------------------------------------------------------


def _unpack(frame: bytes | memoryview) -> dict[str, Any]:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise MessageError(f"frame of {len(frame)} bytes, at most {MAX_MESSAGE_BYTES} are read")
    try:
        raw = msgpack.unpackb(frame, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise MessageError(f"not msgpack: {error}") from error
    if type(raw) is not dict:
        raise MessageError(f"a message is a map, got {type(raw).__name__}")
    return raw


# -- encoding -----------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Turn what msgpack does not know into what it knows (its `default` hook)."""
    if is_dataclass(value):
        return _to_map(value)
    raise TypeError(f"{type(value).__name__} has no wire format")


def _to_map(value: Any) -> dict[str, Any]:
    names, fetch, defaults, mappings = _shape_of_class(type(value))
    row = {
        name: item
        for name, item, default in zip(names, fetch(value), defaults, strict=True)
        if item is not default and (item != default or type(item) is not type(default))
    }
    for name in mappings:
        if name in row:
            row[name] = list(row[name].items())
    return row


def _make_shape(cls: type) -> Shape:
    names = tuple(f.name for f in fields(cls))
    hints = get_type_hints(cls)
    mappings = tuple(name for name in names if get_origin(hints[name]) is Mapping)
    return names, _fetcher(names), tuple(_default(f) for f in fields(cls)), mappings


_shape_of_class: Callable[[Any], Shape] = cache(_make_shape)


def _fetcher(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)  # one call in C for all fields
    return lambda value: tuple(getattr(value, name) for name in names)


def _default(f: Field[Any]) -> Any:
    if f.default is not MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not MISSING else _REQUIRED


# -- decoding -----------------------------------------------------------------------------------


def _make_decoder(cls: type) -> Decoder:
    hints, path = get_type_hints(cls), cls.__name__
    decoders = [
        (f.name, _default(f) is _REQUIRED, _decoder(hints[f.name], f"{path}.{f.name}"))
        for f in fields(cls)
    ]

    def decode_fields(raw: Any) -> Any:
        if type(raw) is not dict:
            raise MessageError(f"{path}: expected a map, got {type(raw).__name__}")
        known = {}
        for name, required, decoder in decoders:
            if name in raw:
                known[name] = decoder(raw[name])
            elif required:
                raise MessageError(f"{path}: field {name} is missing")
        try:
            return cls(**known)
        except ValueError as error:
            raise MessageError(f"{path}: {error}") from error

    return decode_fields


_decoder_of_class: Callable[[Any], Decoder] = cache(_make_decoder)


def _decoder(hint: Any, path: str) -> Decoder:
    """Return the checker of one field type; TypeError for a type without a wire form."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return _scalar(hint, path)
    if is_dataclass(hint):
        return _decoder_of_class(hint)
    if hasattr(hint, "_field_defaults"):
        return _record(hint, path)
    if origin is Literal:
        return _literal(args, path)
    if origin in (types.UnionType, Union):
        return _optional(args, path)
    if origin is tuple and args[-1] is Ellipsis:
        return _int_sequence(path) if args[0] is int else _sequence(args[0], path)
    if origin is tuple:
        return _fixed(args, path)
    if origin is Mapping:
        return _mapping(args, path)
    raise TypeError(f"{path}: a field of type {hint} has no wire format")


_SCALARS: Mapping[Any, str] = {
    int: "64-bit integer",
    float: "number",
    str: "string",
    bool: "boolean",
}


def _scalar(hint: type, path: str) -> Decoder:
    if hint is int:
        return lambda raw: raw if type(raw) is int and raw in _INT64 else _wrong(path, hint, raw)
    if hint is float:
        return lambda raw: float(raw) if type(raw) in (float, int) else _wrong(path, hint, raw)
    return lambda raw: raw if type(raw) is hint else _wrong(path, hint, raw)


def _wrong(path: str, hint: type, raw: Any) -> NoReturn:
    shown = repr(raw)[:40] if type(raw) in (int, str) else type(raw).__name__
    raise MessageError(f"{path}: expected a {_SCALARS[hint]}, got {shown}")


def _literal(allowed: tuple[Any, ...], path: str) -> Decoder:
    def decode_literal(raw: Any) -> Any:
        if type(raw) is not str or raw not in allowed:
            raise MessageError(f"{path}: expected one of {allowed}, got {repr(raw)[:40]}")
        return raw

    return decode_literal


def _optional(args: tuple[Any, ...], path: str) -> Decoder:
    (hint,) = (arg for arg in args if arg is not type(None))
    decoder = _decoder(hint, path)
    return lambda raw: None if raw is None else decoder(raw)


def _list(raw: Any, path: str) -> list[Any]:
    if type(raw) is not list:
        raise MessageError(f"{path}: expected a list, got {type(raw).__name__}")
    return raw


def _sequence(hint: Any, path: str) -> Decoder:
    decoder = _decoder(hint, path)
    return lambda raw: tuple([decoder(item) for item in _list(raw, path)])


def _int_sequence(path: str) -> Decoder:
    def decode_ints(raw: Any) -> tuple[int, ...]:
        """Decode token ids: prompts are long, so the types are checked in C."""
        items = _list(raw, path)
        if items and (set(map(type, items)) != {int} or max(items) not in _INT64):
            raise MessageError(f"{path}: expected a list of 64-bit integers")
        return tuple(items)

    return decode_ints


def _fixed(args: tuple[Any, ...], path: str) -> Decoder:
    decoders = [_decoder(arg, path) for arg in args]

    def decode_fixed(raw: Any) -> tuple[Any, ...]:
        items = _list(raw, path)
        if len(items) != len(decoders):
            raise MessageError(f"{path}: expected {len(decoders)} items, got {len(items)}")
        return tuple([decoder(item) for decoder, item in zip(decoders, items, strict=True)])

    return decode_fixed


def _record(cls: Any, path: str) -> Decoder:
    """Read a named tuple; msgpack writes it as the list of its fields without any help."""
    hints, names = get_type_hints(cls), cls._fields
    decoders = [_decoder(hints[name], f"{path}.{name}") for name in names]
    num_required = len(names) - len(cls._field_defaults)

    def decode_record(raw: Any) -> Any:
        items = _list(raw, path)
        if len(items) < num_required:
            raise MessageError(f"{path}: field {names[len(items)]} is missing")
        return cls(*[decoder(item) for decoder, item in zip(decoders, items, strict=False)])

    return decode_record


def _mapping(args: tuple[Any, ...], path: str) -> Decoder:
    pair = _fixed(args, path)
    return lambda raw: dict([pair(item) for item in _list(raw, path)])
