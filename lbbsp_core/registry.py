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
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lbbsp_core import cost, policy, predict, sync
from lbbsp_core.installation import extra
from lbbsp_core.validate import require_known, shortened

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
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
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    module: str = ""
    extra: str = ""

    @property
    def open_fields(self) -> dict[str, inspect.Parameter]:
        """Fields of the class that are not among the options, by name, in their order."""
        fields = (
            inspect.signature(self.cls).parameters if dataclasses.is_dataclass(self.cls) else {}
        )
        return {name: field for name, field in fields.items() if name not in self.options}

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the open fields without a default."""
        return tuple(k for k, v in self.open_fields.items() if v.default is v.empty)

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
            raise ValueError(f"{self.text} needs {self.module}: pip install {extra(self.extra)}")
        filled = {name: value for name, value in context.items() if self.accepts(name)}
        if absent := [name for name in self.missing if name not in filled]:
            form = ":".join([self.text, *map(str.upper, absent)])
            raise ValueError(f"{self.text} needs {', '.join(absent)}: write {form}")
        create: Callable[..., T] = self.cls
        return create(**self.options, **filled)

    def with_options(self, text: str, options: Sequence[str]) -> Component[T]:
        """Returns the component with more options.

        Texts without ``=`` fill the open fields in their order; `text` names the result.
        """
        names, values = list(self.open_fields), dict[str, object]()
        if options and not names:
            raise ValueError(f"{self.text} takes no options, got {text!r}: write {self.text}")
        for position, option in enumerate(options):
            name, equals, value = option.partition("=")
            if not equals:
                if position >= len(names):
                    raise ValueError(
                        f"{self.text} takes at most {len(names)} options ({', '.join(names)}), got "
                        f"{text!r}: leave out {option!r}"
                    )
                name, value = names[position], option
            require_known(f"option of {self.text}", name, names)
            if name in values:
                raise ValueError(f"{text!r} gives the option {name} twice: leave one out")
            values[name] = _read(f"{self.text}: {name}", value, get_type_hints(self.cls)[name])
        return dataclasses.replace(self, text=text, options={**self.options, **values})


class Registry(dict[str, Component[T]]):
    """Components of one kind by name."""

    def __init__(self, kind: str, protocol: type, *components: Component[T]) -> None:
        super().__init__({component.text: component for component in components})
        self.kind = kind
        self._noun = protocol.__name__.lower()
        self._members = sorted(
            name for name in {*vars(protocol), *protocol.__annotations__} if name[0] != "_"
        )

    def parse(self, text: str) -> Component[T]:
        """Reads a name, or ``module:Name``, with options."""
        name, *options = text.split(":")
        parts = [*name.split("."), *options[:1]]
        if name not in self and options and all(map(str.isidentifier, parts)):
            return self._import(name, options[0]).with_options(text, options[1:])
        return self[require_known(self.kind, name, self)].with_options(text, options)

    def build(self, text: str, **context: object) -> T:
        """Creates a component by its text, see `parse` and `Component.build`."""
        return self.parse(text).build(**context)

    def resolve(self, value: T | str, **context: object) -> T:
        """Returns a component that is given by its text, or as an object."""
        if isinstance(value, str):
            return self.build(value, **context)
        lacking = self._lacking(value)
        if not lacking and not isinstance(value, type):
            return value
        got, remedy = shortened(value), f"choose from {', '.join(self)}, or pass an object"
        if not lacking:
            name = getattr(value, "__name__", "")
            got, remedy = f"the class {name}", f"create an object, as in {self.kind}={name}(...)"
        elif len(lacking) < len(self._members):
            got += f", which lacks {', '.join(lacking)}"
        raise TypeError(f"{self.kind} must be a {self._noun} or its name, got {got}: {remedy}")

    def name_of(self, value: T | str) -> str:
        """Returns the text itself, the name of an equal component, or else the object's repr."""
        if isinstance(value, str):
            return value
        complete = (k for k, v in self.items() if v.is_available and not v.missing)
        return next((name for name in complete if self.build(name) == value), repr(value))

    def _lacking(self, value: object) -> list[str]:
        """Returns the members of the protocol that an object or a class lacks."""
        return [member for member in self._members if not hasattr(value, member)]

    def _import(self, module_name: str, name: str) -> Component[T]:
        try:
            cls = getattr(importlib.import_module(module_name), name, None)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module exists, but one that it imports does not
            raise ValueError(
                f"there is no {self.kind} {module_name!r}, and no module of that name to import: "
                f"choose from {', '.join(self)}, or run the command where {module_name} can be "
                "imported"
            ) from None
        except Exception as error:
            raise ValueError(
                f"module {module_name} of a {self.kind} cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(cls, type):
            raise ValueError(
                f"module {module_name} has no class {name!r}: name a class that satisfies the "
                f"contract of a {self.kind}, see lbbsp_core.testing"
            )
        if lacking := self._lacking(cls):
            raise ValueError(
                f"{module_name}:{name} is not a {self.kind}, since it lacks {', '.join(lacking)}: "
                "add them, and check the contract with lbbsp_core.testing"
            )
        return Component(f"{module_name}:{name}", cls)


def _number(text: str) -> float:
    """Returns a number; an int wherever `text` is one, since some floats must be whole."""
    try:
        return int(text)
    except ValueError:
        return float(text)


_READERS: Final[dict[object, tuple[str, Callable[[str], object]]]] = {
    bool: ("true or false", lambda text: {"true": True, "false": False}[text.lower()]),
    int: ("an integer", int),
    float: ("a number", _number),
    tuple[float, ...]: ("numbers such as 2/1/1", lambda text: tuple(map(float, text.split("/")))),
    str: ("a text", str),
    type(None): ("none", lambda text: {"none": None}[text.lower()]),
}
"""How fields of these types are described and read."""


def _read(label: str, text: str, kind: object) -> object:
    """Returns the value of a field of type `kind` that is written as `text`."""
    expected = []
    for member in get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,):
        literal = get_args(member) if get_origin(member) is Literal else ()
        choices = {choice: choice for choice in literal if isinstance(choice, str)}
        if not choices and member not in _READERS:
            continue
        form, read = (" or ".join(choices), choices.__getitem__) if choices else _READERS[member]
        try:
            return read(text)
        except (ValueError, KeyError):
            expected.append(form)
    if not expected:
        raise ValueError(
            f"{label} cannot be written as text: define a class with the value as its default, and "
            "name it by module:Name"
        )
    raise ValueError(f"{label} must be {' or '.join(expected)}, got {text!r}")


POLICIES: Final[Registry[policy.Policy]] = Registry(
    "policy",
    policy.Policy,
    Component("bsp", policy.Even),
    Component("fixed", policy.FixedShares),
    Component("dbs", policy.EpochBalanced),
    Component("proportional", policy.ProportionalControl),
    Component("leader-straggler", policy.LeaderStraggler),
    Component("lbbsp", policy.LoadBalanced),
    Component("lbbsp-every", policy.LoadBalanced, {"min_gain": 0.0}),
    Component("observe", policy.Observe),
)
"""All policies. ``fixed`` needs ``shares``, which the simulator takes from a profile.

``lbbsp-every`` adopts every change, as the paper does; ``lbbsp`` only those that gain enough.
"""

PREDICTORS: Final[Registry[predict.Predictor]] = Registry(
    "predictor",
    predict.Predictor,
    Component("last", predict.LastValue),
    Component("ema0.2", predict.Ema, {"alpha": 0.2}),
    Component("ema0.5", predict.Ema, {"alpha": 0.5}),
    Component("arima", predict.Arima, module="statsmodels", extra="arima"),
    Component("rnn", predict.Recurrent, {"kind": "rnn"}),
    Component("lstm", predict.Recurrent, {"kind": "lstm"}),
    Component("narx", predict.Narx),
    Component("narx-without-drivers", predict.Narx, {"use_exogenous": False}),
    Component("mixture", predict.Mixture),
)
"""All predictors. Those with a field ``horizon`` are trained for that horizon."""

SYNCHRONISERS: Final[Registry[sync.Synchroniser]] = Registry(
    "sync",
    sync.Synchroniser,
    Component("bsp", sync.BSP),
    Component("ssp", sync.SSP),
    Component("asp", sync.ASP),
    Component("dssp", sync.DSSP),
    Component("elasticbsp", sync.ElasticBSP),
)
"""All synchronisers, such as ``ssp:3``, ``ssp:inf``, ``dssp:3:15`` and ``elasticbsp:15``."""

COSTS: Final[Registry[cost.Cost]] = Registry(
    "cost",
    cost.Cost,
    Component("proportional", cost.Proportional),
    Component("affine", cost.Affine),
    Component("saturating", cost.Saturating),
)
"""All costs with a formula; a `Profile` is named by its file (`runtime.options.naming`)."""
