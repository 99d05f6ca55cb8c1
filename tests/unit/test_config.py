import string
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from stretto.config import Config, LoadedConfig, load, set_derived_values, to_toml
from stretto.errors import ConfigError
from stretto.units import Bytes


class Ring(Config):
    kind: Literal["ring"] = "ring"
    hops: int = 1


class Star(Config):
    kind: Literal["star"] = "star"
    centre: int = 0


class Sync(Config):
    kind: Literal["sync"] = "sync"
    bucket: Bytes = 25_000_000
    every: int = 7


class Gossip(Config):
    kind: Literal["gossip"] = "gossip"
    every: int = Field(1, ge=1)
    topology: Annotated[Ring | Star, Field(discriminator="kind")] = Ring(hops=2)


class Layer(Config):
    width: int
    activation: Literal["relu", "gelu"] = "relu"


class Train(Config):
    steps: int = Field(10, ge=1)
    """Optimizer updates in the whole run."""
    lr: float = Field(0.1, gt=0, le=1)
    threads: int | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _lucky(self):
        if self.steps == 13:
            raise ValueError("13 steps are one too many; take 12")
        return self


class Run(Config):
    name: str
    path: Path | None = None
    verbose: bool = False
    train: Train = Train()
    strategy: Annotated[Sync | Gossip, Field(discriminator="kind")] = Sync(bucket=3)
    backup: Annotated[Sync | Gossip, Field(discriminator="kind")] | None = None
    layers: tuple[Layer, ...] = (Layer(width=3), Layer(width=4))
    bucket_lengths: tuple[int, ...] = ()
    algorithms: dict[str, str] = Field(default_factory=dict)


NAMED = 'name = "x"\n'


@pytest.fixture
def read(tmp_path):
    """Load a run file of this text."""

    def from_text(text: str, *overrides: str) -> LoadedConfig[Run]:
        file = tmp_path / "run.toml"
        file.write_text(text, encoding="utf-8")
        return load(Run, file, overrides)

    return from_text


def test_a_file_sets_values_at_every_depth(read):
    text = 'name = "x"\npath = "a/b"\nbucket_lengths = [1, 2]\n[strategy]\nkind = "gossip"\n'
    text += '[strategy.topology]\nkind = "star"\ncentre = 5\n[[layers]]\nwidth = 9\n'
    expected = Run(
        name="x",
        path=Path("a/b"),
        bucket_lengths=(1, 2),
        strategy=Gossip(topology=Star(centre=5)),
        layers=(Layer(width=9),),
    )
    assert read(text).config == expected


def test_without_a_file_overrides_apply_to_the_defaults():
    assert load(Run, None, ["name=x"]).config == Run(name="x")


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError):
        Train().steps = 3


def test_an_integer_is_accepted_for_a_float(read):
    assert read(NAMED + "[train]\nlr = 1\n").config.train.lr == 1.0


def test_a_size_may_be_written_with_its_unit(read):
    assert read(NAMED + '[strategy]\nbucket = "2KiB"\n').config.strategy.bucket == 2048


def test_a_table_without_kind_has_the_default_kind_and_its_other_keys(read):
    assert read(NAMED + "[strategy]\nevery = 3\n").config.strategy == Sync(bucket=3, every=3)


def test_an_inner_table_without_kind_takes_the_default_of_the_kind_the_file_chose(read):
    text = NAMED + '[strategy]\nkind = "gossip"\n[strategy.topology]\nhops = 5\n'
    assert read(text).config.strategy == Gossip(topology=Ring(hops=5))


def test_a_table_inside_a_list_takes_its_default_kind_too(tmp_path):
    class Model(Config):
        parts: tuple[Gossip, ...]

    file = tmp_path / "model.toml"
    file.write_text("[[parts]]\n[parts.topology]\nhops = 5\n")
    assert load(Model, file).config.parts == (Gossip(topology=Ring(hops=5)),)


def test_an_empty_table_is_the_default_table(read):
    assert read(NAMED + "[strategy]\n").config.strategy == Sync(bucket=3)


def test_a_file_that_changes_kind_inherits_nothing_of_the_default(read):
    assert read(NAMED + '[strategy]\nkind = "gossip"\n').config.strategy == Gossip()


def test_an_override_that_changes_kind_drops_the_settings_for_the_other_kind(read):
    loaded = read(NAMED + "[strategy]\nbucket = 8\nevery = 5\n", "strategy.kind=gossip")
    assert loaded.config.strategy == Gossip()
    assert loaded.source["strategy.every"] == "default"


def test_an_override_that_repeats_the_kind_drops_nothing(read):
    loaded = read(NAMED + "[strategy]\nevery = 5\n", "strategy.kind=sync")
    assert loaded.config.strategy == Sync(bucket=3, every=5)


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_of_overrides_of_a_kind_and_its_keys_does_not_matter(read, order):
    overrides = ["strategy.every=4", "strategy.kind=gossip"][::order]
    text = NAMED + "[strategy]\nbucket = 8\n"
    assert read(text, *overrides).config.strategy == Gossip(every=4)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("name=gpt", "gpt"),
        ("name=a/b c.txt", "a/b c.txt"),
        ('name="5"', "5"),
        ("name=a=b", "a=b"),
        ('name=""', ""),
        ("name=1\nverbose = true", "1\nverbose = true"),
    ],
)
def test_an_override_that_is_not_toml_is_plain_text(override, value):
    assert load(Run, None, [override]).config == Run(name=value)


SET = NAMED + "verbose = true\n[train]\nsteps = 4\nlr = 0.2\n"
SET += (
    '[strategy]\nkind = "gossip"\nevery = 5\n[backup]\nkind = "sync"\n[algorithms]\nbig = "ring"\n'
)
UNSET = {
    "a key": (["train.steps="], {"train": Train(lr=0.2)}),
    "a key, with blanks": (["train.steps = "], {"train": Train(lr=0.2)}),
    "a key of a kind": (["strategy.every="], {"strategy": Gossip()}),
    "a table": (["train="], {"train": Train()}),
    "a table of a kind": (["strategy="], {"strategy": Sync(bucket=3)}),
    "a table that is not there by itself": (["backup="], {"backup": None}),
    "a kind, with the settings for it": (["strategy.kind="], {"strategy": Sync(bucket=3)}),
    "an entry of a mapping": (["algorithms.big="], {"algorithms": {}}),
    "keys that nobody set": (["path=", "algorithms.small=", "layers.1.activation="], {}),
    "a key that an override set": (["train.steps=9", "train.steps="], {"train": Train(lr=0.2)}),
    "a key of a table that an override set": (
        ["train={steps=9}", "train.steps="],
        {"train": Train(lr=0.2)},
    ),
    "before it is set": (["train.steps=", "train.steps=9"], {"train": Train(steps=9, lr=0.2)}),
    "a table, before setting it again": (
        ["train=", "strategy=", "strategy.kind=gossip", "train.lr=0.3"],
        {"train": Train(lr=0.3), "strategy": Gossip()},
    ),
    "a key that another kind has": (
        ["strategy.bucket=", "strategy.kind=sync"],
        {"strategy": Sync(bucket=3)},
    ),
}


@pytest.mark.parametrize(("overrides", "differing"), UNSET.values(), ids=UNSET)
def test_an_override_without_a_value_unsets_the_key(read, overrides, differing):
    assert read(SET, *overrides).config == read(SET).config.model_copy(update=differing)


def test_an_unset_key_of_file_or_recipe_has_its_default_again(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(NAMED + "[train]\nlr = 0.3\n")
    recipe = {"train": {"steps": 4, "lr": 0.2}, "strategy": {"kind": "gossip", "every": 5}}
    loaded = load(Run, file, ["train.lr=", "strategy.every="], recipe=recipe)
    assert loaded.config == Run(name="x", train=Train(steps=4), strategy=Gossip())
    assert {loaded.source[key] for key in ("train.lr", "strategy.every")} == {"default"}
    assert {loaded.source[key] for key in ("train.steps", "strategy.kind")} == {"recipe"}


def test_unsetting_the_kind_of_an_override_removes_its_table(read):
    assert read(NAMED, "backup.kind=sync", "backup.kind=").config.backup is None


def test_unsetting_a_kind_that_is_the_default_drops_nothing(read):
    loaded = read(NAMED + '[strategy]\nkind = "sync"\nevery = 5\n', "strategy.kind=")
    assert loaded.config.strategy == Sync(bucket=3, every=5)
    assert loaded.source["strategy.kind"] == "default"


def test_the_last_of_two_equal_overrides_wins():
    assert load(Run, None, ["name=x", "train.steps=3", "train.steps=4"]).config.train.steps == 4


def test_an_override_may_name_one_item_of_a_list_of_tables(read):
    assert read(NAMED, "layers.1.width=9").config.layers == (Layer(width=3), Layer(width=9))


def test_an_override_may_give_a_whole_table_or_list(read):
    config = read(NAMED, "train={steps=3, lr=0.5}", "bucket_lengths=[4, 5]").config
    assert (config.train, config.bucket_lengths) == (Train(steps=3, lr=0.5), (4, 5))


def test_a_quoted_part_of_a_key_may_hold_a_dot():
    assert load(Run, None, ["name=x", 'algorithms."a.b"=ring']).config.algorithms == {"a.b": "ring"}


def test_every_leaf_has_the_source_that_set_it_last(read):
    text = NAMED + "[train]\nsteps = 4\nlr = 0.2\n[[layers]]\nwidth = 1\n"
    source = read(text, "train.lr=0.3", "layers.0.activation=gelu", "algorithms.big=ring").source
    assert source == {
        "name": "run.toml",
        "path": "default",
        "verbose": "default",
        "train.steps": "run.toml",
        "train.lr": "override",
        "train.threads": "default",
        "strategy.kind": "default",
        "strategy.bucket": "default",
        "strategy.every": "default",
        "backup": "default",
        "layers.0.width": "run.toml",
        "layers.0.activation": "override",
        "bucket_lengths": "default",
        "algorithms.big": "override",
    }


def test_keys_that_a_validator_expands_have_the_source_of_the_text():
    class Short(Config):
        ring: Annotated[Ring, BeforeValidator(lambda hops: {"hops": hops})]

    assert load(Short, None, ["ring=4"]).source["ring.hops"] == "override"


def test_set_derived_values_sets_only_those_keys(read):
    loaded = read(NAMED + "[train]\nsteps = 4\n")
    resolved = set_derived_values(
        loaded, {"bucket_lengths": (1, 2), "train.threads": 2, "algorithms": {"1KB": "ring"}}
    )
    derived = {key for key, source in resolved.source.items() if source == "derived"}
    assert derived == {"bucket_lengths", "train.threads", "algorithms.1KB"}
    assert resolved.config == Run(
        name="x", bucket_lengths=(1, 2), train=Train(steps=4, threads=2), algorithms={"1KB": "ring"}
    )
    assert resolved.source["train.steps"] == "run.toml"


def test_set_derived_values_takes_a_config_as_a_value(read):
    resolved = set_derived_values(read(NAMED), {"backup": Gossip(every=3)}, note="planner")
    assert resolved.config.backup == Gossip(every=3)
    assert resolved.source["backup.every"] == "planner"


def test_set_derived_values_does_not_change_its_argument(read):
    loaded = read(NAMED)
    set_derived_values(loaded, {"bucket_lengths": (1,)})
    assert (loaded.config.bucket_lengths, loaded.source["bucket_lengths"]) == ((), "default")


def test_set_derived_values_validates_the_values(read):
    with pytest.raises(ConfigError, match=r"derived: train\.threads = 1\.5: expected a whole"):
        set_derived_values(read(NAMED), {"train.threads": 1.5})


def test_the_written_file_has_a_source_on_every_setting_and_lists_unset_keys(read):
    written = to_toml(read(NAMED + "[train]\nsteps = 4\n", "train.lr=0.3"))
    assert 'name = "x"  # run.toml\n# path: not set\n' in written
    assert "[train]\nsteps = 4  # run.toml\nlr = 0.3  # override\n" in written
    settings = [line for line in written.splitlines() if " = " in line]
    assert all(line.split("  # ")[-1] in ("run.toml", "override", "default") for line in settings)


def test_a_note_cannot_break_the_file_that_quotes_it(read):
    noted = set_derived_values(read(NAMED), {"bucket_lengths": (1,)}, note="two\nlines")
    assert read(to_toml(noted)).config == noted.config


def test_a_byte_order_mark_is_ignored(read):
    assert read("\ufeff" + NAMED).config == Run(name="x")


def test_a_file_name_cannot_break_the_file_that_quotes_it(tmp_path):
    file = tmp_path / "a\nname = 5.toml"
    file.write_text(NAMED)
    (tmp_path / "again.toml").write_text(to_toml(load(Run, file)))
    assert load(Run, tmp_path / "again.toml").config == Run(name="x")


texts = st.text(st.characters(codec="utf-8"), max_size=8)
# parse_bytes converts through a float, which is exact up to 2**53.
strategies = st.one_of(
    st.builds(Sync, bucket=st.integers(0, 2**53), every=st.integers()),
    st.builds(
        Gossip,
        every=st.integers(min_value=1),
        topology=st.builds(Ring, hops=st.integers()) | st.builds(Star, centre=st.integers()),
    ),
)
runs = st.builds(
    Run,
    name=texts,
    path=st.none() | st.text(string.ascii_letters + "./ ", min_size=1).map(Path),
    verbose=st.booleans(),
    train=st.builds(
        Train,
        steps=st.integers(min_value=14),
        lr=st.floats(0, 1, exclude_min=True),
        threads=st.just("auto") | st.integers(),
    ),
    strategy=strategies,
    backup=st.none() | strategies,
    layers=st.lists(
        st.builds(Layer, width=st.integers(), activation=st.sampled_from(["relu", "gelu"])),
        max_size=3,
    ).map(tuple),
    bucket_lengths=st.lists(st.integers(), max_size=3).map(tuple),
    algorithms=st.dictionaries(texts, texts, max_size=3),
)


@given(runs)
def test_a_written_config_is_read_back_equal(tmp_path_factory, run):
    file = tmp_path_factory.getbasetemp() / "written.toml"
    file.write_bytes(to_toml(LoadedConfig(run, {})).encode())
    assert load(Run, file).config == run


@given(runs)
def test_a_written_config_is_complete(tmp_path_factory, run):
    file = tmp_path_factory.getbasetemp() / "written.toml"
    file.write_bytes(to_toml(LoadedConfig(run, {})).encode())
    loaded = load(Run, file)
    unset = {key for key, source in loaded.source.items() if source == "default"}
    assert unset == {key for key in ("path", "backup") if getattr(run, key) is None}
