"""Command-line flags derived from frozen dataclasses: the annotation of a field is its help text.

A value comes from the command line, else from the environment, else from the `--config` file,
else from the dataclass. Nested dataclasses are flattened; a field name that appears in two of
them is one flag that sets both.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cyclopts import App, Group, Parameter, Token

ConfigT = TypeVar("ConfigT")

ENV_PREFIX = "WHALEPOD_"
UNIT_SUFFIXES = ("_bytes", "_s")
"""Units that a field name carries and its flag does not: `--kv-cache-memory 2G`."""
CHOICE_ALIASES = {"float32": "fp32", "bfloat16": "bf16"}
FLAG_ALIASES = {
    "expert-parallel-size": "ep",
    "all2all-backend": "ep-transport",
    "num-nodes": "nnodes",
    "master-address": "master-addr",
}
"""Short names of flags."""
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SCALES |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"([+-]?[0-9_]+(?:\.[0-9]+)?)\s*([kmgtKMGT]?)(?:i?B)?")


def require_positive(config: object, *names: str) -> None:
    """Raise ValueError if a field, or the least of a tuple of numbers, is below 1 or missing."""
    for name in names:
        value = getattr(config, name)
        if (min(value, default=0) if isinstance(value, tuple) else value) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


class UsageError(Exception):
    """The command line, the environment or the config file asks for something that cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag: the field that it sets, whatever dataclasses have that field."""

    field: str
    type: Any
    help: str
    default: Any
    group: str

    @property
    def name(self) -> str:
        """The flag without dashes in front: `kv-cache-memory`."""
        name = self.field
        for suffix in UNIT_SUFFIXES:
            name = name.removesuffix(suffix)
        return name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.replace("-", "_").upper()


Groups = Mapping[type | str, str]
"""The help groups of dataclasses, and of single fields by their names."""


def flags_of(configs: Iterable[type], groups: Groups) -> dict[str, Flag]:
    """List the flags of dataclasses and of the dataclasses in them, by field name, in order."""
    flags: dict[str, Flag] = {}
    for config in configs:
        hints = get_type_hints(config, include_extras=True)
        for field in dataclasses.fields(config):
            hint = hints[field.name]
            if dataclasses.is_dataclass(hint) and isinstance(hint, type):
                flags |= {k: f for k, f in flags_of([hint], groups).items() if k not in flags}
            elif field.name not in flags:
                group = groups.get(field.name) or groups.get(config, "Options")
                flags[field.name] = _flag(field, hint, group)
    return flags


def _flag(field: dataclasses.Field[Any], hint: Any, group: str) -> Flag:
    kind, text = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, "")
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return Flag(field=field.name, type=kind, help=text, default=default, group=group)


def build(config: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Construct a dataclass, and those in it, from values by field name; the rest is default.

    Raises UsageError with the dataclass's own sentence when its checks fail.
    """
    hints = get_type_hints(config)
    arguments = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            arguments[field.name] = build(hint, values)
        elif field.name in values:
            arguments[field.name] = values[field.name]
    try:
        return config(**arguments)
    except ValueError as error:
        raise UsageError(str(error)) from None


def command_of(
    run: Callable[..., int],
    *configs: type,
    groups: Groups | None = None,
    positional: Sequence[str] = (),
    env_fields: Sequence[str] | None = None,
) -> Callable[..., int]:
    """Make `run(*configs)` a command whose flags are the fields of `configs`.

    positional   fields that may be given without a flag, in this order
    env_fields   fields that `WHALEPOD_*` may set; None: all of them
    """
    flags = flags_of(configs, groups or {})
    order = list((groups or {}).values()) + [flag.group for flag in flags.values()]
    ordered = [flags[field] for field in positional]
    ordered += [flag for flag in flags.values() if flag.field not in positional]
    signature = inspect.Signature(
        [
            _parameter(
                flag,
                Group(flag.group, sort_key=order.index(flag.group)),
                positional=flag.field in positional,
                env=env_fields is None or flag.field in env_fields,
            )
            for flag in ordered
        ]
    )

    def command(*args: Any, **kwargs: Any) -> int:
        values = signature.bind(*args, **kwargs).arguments
        return run(*(build(config, values) for config in configs))

    command.__name__ = run.__name__
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    command.__doc__ = _reflow(inspect.getdoc(run) or "")
    return command


def _reflow(text: str) -> str:
    """Join the lines of each paragraph: the help page wraps them to the terminal."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _parameter(flag: Flag, group: Group, *, positional: bool, env: bool) -> inspect.Parameter:
    required = flag.default is dataclasses.MISSING
    is_bool = flag.type is bool
    parameter = Parameter(
        name=None if positional and required else _names(flag),
        help=flag.help,
        group=group,
        env_var=flag.env if env else None,
        show_env_var=False,
        negative=f"--no-{flag.name}" if is_bool and flag.default is True else "",
        converter=_converter(flag.type),
        show_default=flag.default is not False and flag.default not in (None, (), ""),
    )
    kinds = inspect.Parameter
    return inspect.Parameter(
        flag.field,
        kinds.POSITIONAL_OR_KEYWORD if positional else kinds.KEYWORD_ONLY,
        default=kinds.empty if required else flag.default,
        annotation=Annotated[flag.type, parameter],
    )


def _names(flag: Flag) -> tuple[str, ...]:
    alias = FLAG_ALIASES.get(flag.name)
    return (f"--{flag.name}",) + ((f"--{alias}",) if alias else ())


def _converter(kind: Any) -> Callable[[Any, Sequence[Token]], Any] | None:
    if get_origin(kind) is Literal:
        return _convert_choice
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return _convert_int if int in members else None


def _convert_choice(kind: Any, tokens: Sequence[Token]) -> str:
    value = CHOICE_ALIASES.get(tokens[0].value, tokens[0].value)
    if value not in (choices := get_args(kind)):
        raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
    return value


def _convert_int(kind: Any, tokens: Sequence[Token]) -> int:
    return parse_number(tokens[0].value)


def parse_number(text: str) -> int:
    """Read `4096`, `25.6k` (thousands), `512M` or `2GiB` (powers of 1,024) as an integer."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a whole number, nor one like 25.6k, 512M or 2G")
    value = Decimal(match[1].replace("_", "")) * _SCALES[match[2]]
    if value % 1:
        raise ValueError(f"{text!r} is {value}, which is not a whole number")
    return int(value)


def read_config_file(app: App, commands: tuple[str, ...], arguments: Any) -> None:
    """Fill what neither the command line nor the environment set from the `--config` file."""
    by_name = {argument.name.lstrip("-"): argument for argument in arguments}
    chosen = by_name.pop("config", None)
    if chosen is None or not chosen.tokens:
        return
    path = Path(chosen.tokens[0].value)
    for key, value in _load_toml(path).items():
        name = key.replace("_", "-")
        for suffix in UNIT_SUFFIXES:
            name = name if name in by_name else name.removesuffix(suffix.replace("_", "-"))
        if name not in by_name:
            nearest = difflib.get_close_matches(name, by_name, n=1, cutoff=0.0)
            raise UsageError(f"{path}: unknown key {key!r}; the nearest is {nearest[0]!r}")
        if not by_name[name].tokens:
            for token in _tokens(path, key, value):
                by_name[name].append(token)


def _load_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {path} cannot be read as TOML: {error}") from None


def _tokens(path: Path, key: str, value: Any) -> list[Token]:
    values = value if isinstance(value, list) else [value]
    for item in values:
        if not isinstance(item, bool | int | float | str):
            raise UsageError(f"{path}: {key} must be a value or a list of values, got {item!r}")
    if isinstance(value, bool):
        return [Token(keyword=key, source=str(path), implicit_value=value)]
    return [
        Token(keyword=key, value=str(v), source=str(path), index=i) for i, v in enumerate(values)
    ]
