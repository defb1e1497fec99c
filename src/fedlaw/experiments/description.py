"""What an experiment is: one frozen, validated description, and the digest that names its run."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import warnings
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from torch import Tensor

from fedlaw import server
from fedlaw.data import malicious_count
from fedlaw.experiments import _specs
from fedlaw.experiments._files import DescriptionError, merged, read_toml, toml_value
from fedlaw.server import ClientId, Server

VERSION = 1  # of the canonical form: raised when its meaning changes, so that old runs keep their ids
_MUST_BE = {  # where pydantic's own words would not help
    "malicious": "must be a share (0.4), a number of clients (12) or a list of clients",
    "split": "must be three numbers: the shares of train, validation and test data",
    "lr": "must be a number over 0",
    "device": "must be cpu, auto, cuda or cuda:NUMBER",
}
_WITHOUT_GROUPS = ("dirichlet", "iid", "natural", "shards")

_SOUND: set[str] = set()  # rules, with what they depend on, that a server was made of before: a sweep has few


class _Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise DescriptionError(_one_line(error, type(self))) from None


class Experiment(_Described):
    """One federated training: data, model, clients, attack, rule, seed. Validated as a whole, then frozen.

    Attributes:
        dataset: name (`fedlaw list datasets`) or import path; `dataset_settings`: its own settings.
        examples: at most so many training examples, drawn by the seed; None: all of the training part.
        split: shares of training, validation and test data, or (as integers) numbers of examples.
        scaling: of the inputs: "standard", "unit" or "none".
        model: name (`fedlaw list models`) or import path; `model_settings`: its own settings.
        clients: how many there are.
        partition: who holds which example (`fedlaw list partitions`); `partition_settings`: its own settings.
            `q=0.9` is short for ``partition_settings={"q": 0.9}``.
        attack: a name, or a mapping with a name and settings (`fedlaw list attacks`).
        malicious: who attacks: a share of the clients (float), a number of them (int), or a list of clients.
        malicious_choice: "groups" (whole label groups, as in the paper) or "random"; unused with a list.
        rule: a name, a mapping with a name and settings, or a list of those (a chain); `fedlaw list rules`.
            `preset="paper"` is short for ``rule={"name": "fedlaw", "preset": "paper"}``.
        rounds: model updates. epochs, batch_size, lr: of a client's local training (alpha is lr).
        loss_point: where clients take the loss they report: "before" or "after" local training.
        participation: share of the clients asked in a round.
        dropout: share of those asked who do not answer, drawn anew in each phase.
        evaluate_every: rounds from one evaluation to the next; the last round is always evaluated.
        seed: of everything that is drawn.

    Attributes `rule`, `attack` and the settings hold the normal form: every setting spelled out.

    >>> a = Experiment(clients=30, malicious=0.4, attack="lie", rule={"name": "krum", "f": 12})
    >>> a.id == Experiment(rule={"f": 12, "name": "krum"}, attack={"name": "lie"}, clients=30, malicious=12).id
    True
    >>> Experiment(clients=5, rule={"name": "krum", "f": 2})
    Traceback (most recent call last):
    fedlaw.experiments._files.DescriptionError: rule 'krum' needs at least 7 clients a round, 5 are asked: ...
    """

    dataset: str = "digits"
    dataset_settings: dict[str, Any] = Field(default_factory=dict)
    examples: int | None = Field(default=None, ge=1, strict=True)
    split: tuple[int | float, int | float, int | float] = (0.8, 0.1, 0.1)
    scaling: Literal["standard", "unit", "none"] = "standard"
    model: str = "mlp"
    model_settings: dict[str, Any] = Field(default_factory=dict)
    clients: int = Field(default=20, ge=1, strict=True)
    partition: str = "q_groups"
    partition_settings: dict[str, Any] = Field(default_factory=dict)
    attack: Any = "none"
    malicious: int | float | tuple[int, ...] = 0.0
    malicious_choice: Literal["groups", "random"] = "groups"
    rule: Any = "fedlaw"
    rounds: int = Field(default=100, ge=1, strict=True)
    epochs: int = Field(default=3, ge=1, strict=True)
    batch_size: int = Field(default=16, ge=1, strict=True)
    lr: float = Field(default=0.02, gt=0)
    loss_point: Literal["before", "after"] = "after"
    participation: float = Field(default=1.0, gt=0, le=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    evaluate_every: int = Field(default=1, ge=1, strict=True)
    seed: int = Field(default=0, ge=0, lt=1 << 63, strict=True)

    def __init__(self, **settings: Any) -> None:
        """Validate `settings`, the attributes and the short spellings; a mistake is a DescriptionError."""
        super().__init__(**settings)

    # -------------------------------------------------------------------------------------- validation
    @model_validator(mode="before")
    @classmethod
    def _fold(cls, given: Any) -> Any:
        """Take the short spellings `q` and `preset`, and a canonical form's version, to where they belong."""
        if not isinstance(given, dict):
            return given
        given = dict(given)
        if (version := given.pop("version", VERSION)) != VERSION:
            raise ValueError(
                f"version {version!r} of the description is not {VERSION}: use the fedlaw that wrote it"
            )
        if (q := given.pop("q", None)) is not None:
            settings = dict(given.get("partition_settings") or {})
            if settings.setdefault("q", q) != q:
                raise ValueError(f"q is given twice: {q} and, in partition_settings, {settings['q']}")
            given["partition_settings"] = settings
        preset = given.pop("preset", None)
        given["rule"] = _specs.normal_rule(given.get("rule", "fedlaw"), preset)
        given["attack"] = _specs.normal_attack(given.get("attack", "none"))
        return given

    @field_validator("malicious", mode="before")
    @classmethod
    def _who(cls, value: Any) -> Any:
        if isinstance(value, bool | str):
            raise ValueError(f"must be a share, a number of clients or a list of clients, got {value!r}")
        if isinstance(value, Iterable):
            clients = tuple(value)
            if any(type(client) is not int for client in clients) or len(set(clients)) != len(clients):
                raise ValueError(f"must list different client numbers, got {list(clients)!r}")
            return tuple(sorted(clients))
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Check what depends on several settings, and bring the settings of the parts to their normal form."""
        for part in ("dataset", "model", "partition"):
            normal = getattr(_specs, f"normal_{part}")
            settings = normal(getattr(self, part), getattr(self, f"{part}_settings"))
            self.__dict__[f"{part}_settings"] = settings
        self._check_split()
        self._check_malicious()
        if self.examples is not None and self.examples < self.clients:
            raise ValueError(f"examples must be at least one a client, {self.clients}, got {self.examples}")
        self._check_rule()
        return self

    def _check_split(self) -> None:
        train, _, test = self.split
        counts = all(type(part) is int for part in self.split) and sum(self.split) > 1
        if min(self.split) < 0 or not train or not test or (not counts and sum(self.split) > 1 + 1e-9):
            raise ValueError(
                "split must be three shares of train, validation and test data that sum to at most 1, or three "
                f"numbers of examples, train and test over 0, got {self.split}"
            )
        if not counts:
            self.__dict__["split"] = tuple(float(part) for part in self.split)

    def _check_malicious(self) -> None:
        n, who = self.clients, self.malicious
        if isinstance(who, tuple):
            if who and not 0 <= who[0] <= who[-1] < n:
                raise ValueError(f"malicious must list clients from 0 to {n - 1}, got {list(who)}")
        elif not 0 <= who < (1 if isinstance(who, float) else n) and who != 0:
            raise ValueError(
                f"malicious must be a share of at least 0 and under 1, or a number from 0 to {n - 1} of the "
                f"{n} clients, got {who}"
            )
        if self.malicious_count == n:
            raise ValueError(f"malicious must leave an honest client, got all {n} clients")
        if (
            self.malicious_count
            and not isinstance(who, tuple)
            and self.malicious_choice == "groups"
            and self.partition in _WITHOUT_GROUPS
        ):
            raise ValueError(
                f"malicious_choice 'groups' needs a partition with groups, such as 'q_groups', and "
                f"{self.partition!r} has none: use malicious_choice 'random' or list the malicious clients"
            )

    def _check_rule(self) -> None:
        """Everything a server says about its settings for so many clients and rounds; once for each of them."""
        told = json.dumps(
            [self.rule, self.clients, self.rounds, self.participation, self.lr], sort_keys=True, default=repr
        )
        if told in _SOUND:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said once, when the run starts
            made = self.server(torch.zeros(1), reference=lambda round, params: params)
        asked = max(1, round(self.participation * self.clients))
        if isinstance(made, server.OnePhase) and (least := made.rule.minimum()) > asked:
            remedy = "lower f" if "f" in self.rule else "change its settings"
            raise ValueError(
                f"rule {self.rule_name!r} needs at least {least} clients a round, {asked} are asked: {remedy} "
                "or raise clients (or participation)"
            )
        if self.rule["minimum_replies"] > asked:
            raise ValueError(
                f"minimum_replies must be at most the {asked} clients asked in a round, got "
                f"{self.rule['minimum_replies']}"
            )
        _SOUND.add(told)

    # -------------------------------------------------------------------------------------- what it says
    @property
    def rule_name(self) -> str:
        """Name of the rule; "chain" for a list."""
        return str(self.rule["name"])

    @property
    def malicious_count(self) -> int:
        """How many clients are malicious."""
        who = self.malicious
        return len(who) if isinstance(who, tuple) else malicious_count(self.clients, who)

    def server(self, params: Tensor, malicious: Iterable[ClientId] = (), *, reference: Any = None) -> Server:
        """The server of this experiment, clients numbered from 0.

        Args:
            params: (d,) the model to start from.
            malicious: who attacks; only the oracle is told.
            reference: the update that the server trusts, for rules that compare with one (see `OnePhase`).
        """
        settings = {key: value for key, value in self.rule.items() if key != "name"}
        if self.rule_name == "oracle":
            settings["malicious"] = tuple(malicious)
        elif "unit" in settings:
            settings["reference"] = reference
        return server.create(
            self.rule_name,
            params,
            range(self.clients),
            rounds=self.rounds,
            alpha=self.lr,
            loss_point=self.loss_point,
            participation=self.participation,
            seed=self.seed,
            **settings,
        )

    def canonical(self) -> dict[str, Any]:
        """Plain data that says all of it in one way; `Experiment(**canonical)` is the same experiment."""
        plain: dict[str, Any] = json.loads(self.model_dump_json())
        if not isinstance(self.malicious, tuple):
            plain["malicious"] = self.malicious_count
        if not self.malicious_count or isinstance(self.malicious, tuple):
            plain["malicious_choice"] = "groups"  # nothing is chosen
        return {"version": VERSION, **plain}

    @cached_property
    def id(self) -> str:
        """Digest of the canonical form: 24 hexadecimal digits, the name of the run."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Experiment) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def replace(self, **changes: Any) -> Experiment:
        """The experiment with other settings, validated anew.

        >>> Experiment(rounds=5).replace(seed=1, q=0.9).partition_settings
        {'q': 0.9}
        """
        return Experiment(**merged({name: getattr(self, name) for name in type(self).model_fields}, changes))

    # -------------------------------------------------------------------------------------- files
    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], **overrides: Any) -> Experiment:
        """The experiment described in a TOML file; `overrides` go before what the file says."""
        return cls(**merged(read_toml(Path(path)), overrides))

    def to_toml(self) -> str:
        """A TOML file's text from which `from_toml` makes the same experiment, every setting spelled out."""
        lines = [
            f"{name} = {toml_value(value, 'none' if name == 'rule' else None)}"
            for name, value in self.canonical().items()
            if value is not None
        ]
        return "\n".join(lines) + "\n"


class Execution(_Described):
    """How a run is carried out: what does not change its result, and is no part of its id.

    Attributes:
        data_dir: folder of the data files; None: the environment variable FEDLAW_DATA.
        backend: of local training: "auto", "batched", "vmap" or "sequential".
        device: "cpu", "cuda" (or "cuda:1"), or "auto": a GPU if there is one.
        precision: of matrix products on a GPU: "float32"; "tf32" (10 bits of mantissa), which is faster and
            changes results in the third digit; or "half" (as many bits, but of a smaller range), which is faster
            still where an MLP is trained and tf32 elsewhere.
        threads: Python threads on a CPU; None: as many as cores.
        checkpoint_seconds: time from one checkpoint to the next.
    """

    data_dir: Path | None = None
    backend: Literal["auto", "batched", "vmap", "sequential"] = "auto"
    device: str = Field(default="cpu", pattern=r"^(cpu|auto|cuda(:\d+)?)$")
    precision: Literal["float32", "tf32", "half"] = "float32"
    threads: int | None = Field(default=None, ge=1)
    checkpoint_seconds: float = Field(default=5.0, ge=0)

    def __init__(self, **settings: Any) -> None:
        """Validate `settings`; a mistake is a DescriptionError of one line."""
        super().__init__(**settings)


def _one_line(error: ValidationError, model: type[BaseModel]) -> str:
    """The first mistake, named by its setting."""
    first = error.errors()[0]
    place = [part for part in first["loc"] if isinstance(part, str) and part in model.model_fields]
    name = place[0] if place else ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = [*model.model_fields, *(("q", "preset") if model is Experiment else ())]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return f"unknown setting {name!r}{hint}; there are: {', '.join(known)}"
    said = first["msg"].removeprefix("Value error, ")
    if not name:
        return said
    if first["type"] == "value_error":
        return f"{name} {said}"
    said = _MUST_BE.get(name) or said.replace("Input should be", "must be")
    return f"{name} {said[0].lower()}{said[1:]}, got {first['input']!r}"
