"""Policies, predictors, synchronisers and costs by name, for the command line and all options.

A component is written as a name with options, by position or by field::

    lbbsp   lbbsp:min_gain=0   ssp:3   ssp:staleness=3   dssp:3:15   elasticbsp:15   narx:hidden=4

``module:Name`` names a class of your own, which Python can import, with options in the same way::

    my_schemes:MyPolicy   my_schemes:MyPolicy:ratio=0.5

Options are the fields of the class, a dataclass; their text is read by the fields' types. Lists of
numbers are separated by slashes: ``fixed:9/12/18``, ``proportional:ratings=9/12/18``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import (
    Any,
    Final,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from lbbsp_core.cost import Affine, Cost, Proportional, Saturating
from lbbsp_core.policy import (
    EpochBalanced,
    Even,
    FixedShares,
    LeaderStraggler,
    LoadBalanced,
    Policy,
    ProportionalControl,
)
from lbbsp_core.predict import Arima, Ema, LastValue, Mixture, Narx, Predictor, Recurrent
from lbbsp_core.sync import ASP, BSP, DSSP, SSP, ElasticBSP, Synchroniser
from lbbsp_core.validate import require_known, shortened

T = TypeVar("T")

_TRUTH: Final = {"true": True, "false": False}


@dataclass(frozen=True)
class Component(Generic[T]):
    """A class and some of its options.

    Args:
        text: Text that names the component with its options.
        cls: Class of the component.
        options: Values of fields of the class, by name.
        module: Optional dependency that the component needs; empty if there is none.
        extra: Extra of this package that installs the module.
    """

    text: str
    cls: type[T]
    options: Mapping[str, object] = field(default_factory=dict)
    module: str = ""
    extra: str = ""

    @property
    def open_fields(self) -> dict[str, dataclasses.Field[Any]]:
        """Fields of the class that are not among the options, by name, in their order."""
        if not dataclasses.is_dataclass(self.cls):
            return {}
        own = {one.name: one for one in dataclasses.fields(self.cls) if one.init}
        return {name: one for name, one in own.items() if name not in self.options}

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the open fields without a default."""
        unset = dataclasses.MISSING
        return tuple(
            name
            for name, one in self.open_fields.items()
            if one.default is unset and one.default_factory is unset
        )

    @property
    def is_available(self) -> bool:
        """True if the module that the component needs is installed."""
        return not self.module or importlib.util.find_spec(self.module) is not None

    def accepts(self, name: str) -> bool:
        """Returns whether `name` is a field that `build` may fill."""
        return name in self.open_fields

    def build(self, **context: object) -> T:
        """Creates the component.

        `context` has values for open fields, such as ``horizon`` of a predictor; those for fields
        that the class lacks, or that are set already, are ignored.
        """
        if not self.is_available:
            raise ValueError(f"{self.text} needs {self.module}: pip install 'lbbsp[{self.extra}]'")
        filled = {name: value for name, value in context.items() if self.accepts(name)}
        absent = [name for name in self.missing if name not in filled]
        if absent:
            form = ":".join([self.text, *map(str.upper, absent)])
            raise ValueError(f"{self.text} needs {', '.join(absent)}: write {form}")
        create: Callable[..., T] = self.cls
        return create(**{**self.options, **filled})

    def with_options(self, text: str, options: Sequence[str]) -> Component[T]:
        """Returns the component with more options.

        Texts without ``=`` fill the open fields in their order; `text` names the result.
        """
        if not options:
            return dataclasses.replace(self, text=text)
        names = list(self.open_fields)
        if not names:
            raise ValueError(f"{self.text} takes no options, got {text!r}: write {self.text}")
        hints = get_type_hints(self.cls)
        given: dict[str, object] = {}
        for position, option in enumerate(options):
            name, equals, value = option.partition("=")
            if not equals:
                name, value = (names[position] if position < len(names) else ""), option
            if not name:
                raise ValueError(
                    f"{self.text} takes at most {len(names)} options ({', '.join(names)}), got "
                    f"{text!r}: leave out {option!r}"
                )
            require_known(f"option of {self.text}", name, names)
            if name in given:
                raise ValueError(f"{text!r} gives the option {name} twice: leave one out")
            given[name] = _read(f"{self.text}: {name}", value, hints[name])
        return dataclasses.replace(self, text=text, options={**self.options, **given})


class Registry(Mapping[str, Component[T]]):
    """Components of one kind by name."""

    def __init__(self, kind: str, protocol: type, components: Sequence[Component[T]]) -> None:
        self.kind = kind
        self.noun = protocol.__name__.lower()
        self._members = sorted(
            name for name in {*vars(protocol), *protocol.__annotations__} if name[0] != "_"
        )
        self._components = {component.text: component for component in components}

    def __getitem__(self, name: str) -> Component[T]:
        return self._components[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._components)

    def __len__(self) -> int:
        return len(self._components)

    def parse(self, text: str) -> Component[T]:
        """Reads a name, or ``module:Name``, with options."""
        name, *options = text.split(":")
        if name in self:
            return self[name].with_options(text, options)
        if options and all(part.isidentifier() for part in [*name.split("."), options[0]]):
            return self._import(name, options[0]).with_options(text, options[1:])
        for other in _registries():
            if name in other:
                raise ValueError(
                    f"{name} is a {other.noun} and no {self.noun}: write {other.kind}={text!r}, "
                    f"or choose a {self.noun} from {', '.join(self)}"
                )
        return self[require_known(self.kind, name, self)]

    def resolve(self, value: T | str, **context: object) -> T:
        """Returns a component that is given by its text, or as an object."""
        if isinstance(value, str):
            return self.build(value, **context)
        if isinstance(value, type) or self.lacking(value):
            raise TypeError(f"{self.kind} must be a {self.noun} or its name, {self._remedy(value)}")
        return value

    def name_of(self, value: T | str) -> str:
        """Returns the text itself, the name of an equal component, or else the object's repr."""
        if isinstance(value, str):
            return value
        complete = (name for name, one in self.items() if one.is_available and not one.missing)
        return next((name for name in complete if self.build(name) == value), repr(value))

    def lacking(self, value: object) -> list[str]:
        """Returns the members of the protocol that an object or a class lacks."""
        return [member for member in self._members if not hasattr(value, member)]

    def _remedy(self, value: object) -> str:
        """Returns what a wrong value is, and what to write instead."""
        owners = [one for one in _registries() if not one.lacking(value)]
        if isinstance(value, type) and owners:
            own = next((name for name in self if self[name].cls is value), "")
            named = f", or {self.kind}={own!r}" if own else ""
            arguments = "..." if own and self[own].missing else ""
            return (
                f"got the class {value.__name__}: create an object, as in "
                f"{owners[0].kind}={value.__name__}({arguments}){named}"
            )
        if owners:
            return (
                f"got {shortened(value)}, which is a {owners[0].noun}: write {owners[0].kind}=..."
            )
        lacking = self.lacking(value)
        partly = f", which lacks {', '.join(lacking)}" if len(lacking) < len(self._members) else ""
        return f"got {shortened(value)}{partly}: choose from {', '.join(self)}, or pass an object"

    def build(self, text: str, **context: object) -> T:
        """Creates a component by its text, see `parse` and `Component.build`."""
        return self.parse(text).build(**context)

    def _import(self, module_name: str, name: str) -> Component[T]:
        cls = getattr(self._import_module(module_name), name, None)
        if not isinstance(cls, type):
            raise ValueError(
                f"module {module_name} has no class {name!r}: name a class that satisfies the "
                f"contract of a {self.kind}, see lbbsp_core.testing"
            )
        if lacking := self.lacking(cls):
            raise ValueError(
                f"{module_name}:{name} is not a {self.kind}, since it lacks {', '.join(lacking)}: "
                "add them, and check the contract with lbbsp_core.testing"
            )
        return Component(f"{module_name}:{name}", cls)

    def _import_module(self, name: str) -> types.ModuleType:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists, but one that it imports does not
            raise ValueError(
                f"there is no {self.kind} {name!r}, and no module of that name to import: choose "
                f"from {', '.join(self)}, or run the command where {name} can be imported"
            ) from None


def _read(what: str, text: str, kind: object) -> object:
    """Returns the value of a field of type `kind` that is written as `text`."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    expected = []
    for one in kinds:
        if get_origin(one) is Literal:
            choices = [choice for choice in get_args(one) if isinstance(choice, str)]
            if text in choices:
                return text
            expected += choices
        elif one is type(None):
            if text.lower() == "none":
                return None
            expected.append("none")
        elif one is bool:
            if text.lower() in _TRUTH:
                return _TRUTH[text.lower()]
            expected += _TRUTH
        elif one in (int, float):
            try:
                return _number(text, one is int)
            except ValueError:
                expected.append("a whole number" if one is int else "a number")
        elif get_args(one) == (float, Ellipsis):
            try:
                return tuple(float(part) for part in text.split("/"))
            except ValueError:
                expected.append("numbers such as 2/1/1")
        elif one is str:
            return text
    if not expected:
        raise ValueError(
            f"{what} cannot be written as text: define a class with the value as its default, and "
            "name it by module:Name"
        )
    raise ValueError(f"{what} must be {' or '.join(expected)}, got {text!r}")


def _number(text: str, whole: bool) -> float:
    """Returns a number; an int wherever `text` is one, since some floats must be whole."""
    try:
        return int(text)
    except ValueError:
        if whole:
            raise
        return float(text)


POLICIES: Final[Registry[Policy]] = Registry(
    "policy",
    Policy,
    [
        Component("bsp", Even),
        Component("fixed", FixedShares),
        Component("dbs", EpochBalanced),
        Component("proportional", ProportionalControl),
        Component("leader-straggler", LeaderStraggler),
        Component("lbbsp", LoadBalanced),
        Component("lbbsp-every", LoadBalanced, {"min_gain": 0.0}),
    ],
)
"""All policies. ``fixed`` needs ``shares``, which the simulator takes from a profile.

``lbbsp-every`` adopts every change, as the paper does; ``lbbsp`` only those that gain enough.
"""

PREDICTORS: Final[Registry[Predictor]] = Registry(
    "predictor",
    Predictor,
    [
        Component("last", LastValue),
        Component("ema0.2", Ema, {"alpha": 0.2}),
        Component("ema0.5", Ema, {"alpha": 0.5}),
        Component("arima", Arima, module="statsmodels", extra="arima"),
        Component("rnn", Recurrent, {"kind": "rnn"}),
        Component("lstm", Recurrent, {"kind": "lstm"}),
        Component("narx", Narx),
        Component("narx-without-drivers", Narx, {"use_exogenous": False}),
        Component("mixture", Mixture),
    ],
)
"""All predictors. Those with a field ``horizon`` are trained for that horizon."""

SYNCHRONISERS: Final[Registry[Synchroniser]] = Registry(
    "sync",
    Synchroniser,
    [
        Component("bsp", BSP),
        Component("ssp", SSP),
        Component("asp", ASP),
        Component("dssp", DSSP),
        Component("elasticbsp", ElasticBSP),
    ],
)
"""All synchronisers."""

COSTS: Final[Registry[Cost]] = Registry(
    "cost",
    Cost,
    [
        Component("proportional", Proportional),
        Component("affine", Affine),
        Component("saturating", Saturating),
    ],
)
"""All costs with a formula; a `Profile` is named by its file (`runtime.options.naming`)."""


def _registries() -> tuple[Registry[Any], ...]:
    return POLICIES, PREDICTORS, SYNCHRONISERS, COSTS


def synchroniser(text: str) -> Synchroniser:
    """Creates a synchroniser by name.

    Args:
        text: Such as ``bsp``, ``ssp:3``, ``ssp:inf``, ``asp``, ``dssp:3:15``, ``elasticbsp:15``
            or ``module:Name``.

    Raises:
        ValueError: An unknown name (names the nearest one) or option, or a value out of range.

    Example:
        >>> synchroniser("dssp:3:15")
        DSSP(lower=3, upper=15)
    """
    return SYNCHRONISERS.build(text)
