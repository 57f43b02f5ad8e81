import json
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.config import ConfigError, RunConfig, Section, dump_config
from shared.config_loading import load_config


def tree() -> dict:
    """The smallest configuration."""
    return {
        "model": {"path": "some/model"},
        "data": {"path": "rows.jsonl"},
        "reward": {"function": "module:grade"},
        "total_steps": 3,
    }


def sections(section: type[Section] = RunConfig, at: str = "") -> dict[str, type[Section]]:
    """Every section by dotted key, found in the annotations."""
    found = {at: section}
    for name, field in section.model_fields.items():
        for choice in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(choice, type) and issubclass(choice, Section):
                found |= sections(choice, f"{at}.{name}".lstrip("."))
    return found


def leaves() -> list[str]:
    """Every key that holds a value."""
    return [
        f"{at}.{name}".lstrip(".")
        for at, section in sections().items()
        for name in section.model_fields
        if f"{at}.{name}".lstrip(".") not in sections()
    ]


def nested(key: str, value: object) -> dict:
    """{"a": {"b": value}} for "a.b"."""
    head, _, rest = key.partition(".")
    return {head: nested(rest, value) if rest else value}


def merged(base: dict, more: dict) -> dict:
    both = dict(base)
    for key, value in more.items():
        both[key] = merged(both.get(key, {}), value) if isinstance(value, dict) else value
    return both


def refusal(source: object, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(source, overrides)  # type: ignore[arg-type]
    return str(refused.value)


def test_the_smallest_configuration_has_defaults():
    config = load_config(tree())
    assert config.rollout.temperature == 1.0
    assert config.actor.optimizer.lr == 1e-6
    assert config.critic.optimizer.lr == 1e-5
    assert config.samples_per_step == 8


def test_every_section_is_reached():
    """The tests below walk these; a section that is not found would not be tested."""
    assert {"", "actor.optimizer", "actor.loss", "critic.model", "algorithm.kl", "reference_model"} <= set(sections())
    assert len(leaves()) > 80


@pytest.mark.parametrize("key", leaves())
def test_a_misspelt_key_at_any_depth_names_the_nearest(key):
    misspelt = key + "x"
    message = refusal(merged(tree(), nested(misspelt, 7)))
    assert f"unknown key {misspelt!r} (value 7); did you mean {key!r}?" in message


@pytest.mark.parametrize("at", sections())
def test_a_key_like_no_other_lists_the_known_ones(at):
    key = f"{at}.qqqqqqqqqqqqqqqq".lstrip(".")
    message = refusal(merged(tree(), nested(key, 1)))
    assert f"unknown key {key!r}" in message
    assert ", ".join(sorted(sections()[at].model_fields)) in message


def test_misspelt_in_an_override():
    assert "did you mean 'actor.optimizer.lr'?" in refusal(tree(), ("actor.optimizer.lrr=1",))


def test_every_mistake_is_reported_at_once():
    message = refusal(merged(tree(), {"sed": 1, "rollout": {"temperatur": 1, "n": 0}}))
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout.n", 0),
        ("rollout.temperature", 0),
        ("rollout.top_p", 1.5),
        ("rollout.engine", "vlm"),
        ("rollout.engine", "fake"),
        ("model.dtype", "float8"),
        ("actor.optimizer.lr", "fast"),
        ("actor.optimizer.betas", [0.9]),
        ("algorithm.gamma", -1),
        ("algorithm.kl.placement", "both"),
        ("checkpoint.save_interval", 0),
        ("data.batch_size", None),
        ("total_steps", 1.5),
    ],
)
def test_a_bad_value_is_named_with_its_key(key, value):
    message = refusal(merged(tree(), nested(key, value)))
    assert message.startswith(key)
    shown = value[-1] if isinstance(value, list) else value
    assert f"got {value!r}" in message or repr(shown) in message


@pytest.mark.parametrize("key", ["model", "data", "reward", "model.path", "data.path"])
def test_a_missing_key_is_named(key):
    source = tree()
    *heads, last = key.split(".")
    section = source
    for head in heads:
        section = section[head]
    del section[last]
    assert refusal(source).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("actor.optimizer.lr=1e-6", "actor.optimizer.lr", 1e-6),
        ("actor.optimizer.lr=2.5E-3", "actor.optimizer.lr", 2.5e-3),
        ("rollout.n=4", "rollout.n", 4),
        ("data.shuffle=false", "data.shuffle", False),
        ("critic.warmup_steps = 2", "critic.warmup_steps", 2),
        ("critic.model.path=other/model", "critic.model.path", "other/model"),
        ("name=steel", "name", "steel"),
        ("name=2026-01-31", "name", "2026-01-31"),
        ("options.mine=1e-6", "options", {"mine": 1e-6}),
        ("name=1e5x", "name", "1e5x"),
        ("rollout.stop=['</s>', \"e=\"]", "rollout.stop", ("</s>", "e=")),
        ("reward.kwargs={a: 1}", "reward.kwargs", {"a": 1}),
        ("data.validation_path=null", "data.validation_path", None),
    ],
)
def test_overrides(text, key, value):
    found = load_config(tree(), [text])
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


def test_overrides_apply_in_order_and_leave_the_source_alone():
    source = tree()
    assert load_config(source, ["seed=1", "seed=2"]).seed == 2
    assert source == tree()


@pytest.mark.parametrize(
    ("override", "says"),
    [("seed", "'seed' is not key=value"), ("seed.deep=1", "seed is a value, not a section")],
)
def test_overrides_that_are_none(override, says):
    assert says in refusal(tree() | {"seed": 1}, (override,))


def test_yaml_json_text_and_mapping_are_the_same(tmp_path):
    expected = load_config(tree())
    (tmp_path / "run.json").write_text(json.dumps(tree()))
    (tmp_path / "run.yaml").write_text(
        "model: {path: some/model}\ndata:\n  path: rows.jsonl\nreward: {function: 'module:grade'}\ntotal_steps: 3\n"
    )
    for source in (tmp_path / "run.json", str(tmp_path / "run.yaml"), json.dumps(tree()), f"\n {json.dumps(tree())}"):
        assert load_config(source) == expected


def test_a_mapping_may_hold_paths_and_nothing_else_that_json_has_not(tmp_path):
    assert load_config(merged(tree(), {"data": {"path": tmp_path}})).data.path == str(tmp_path)
    assert "not <object" in refusal(merged(tree(), {"options": {"mine": object()}}))


def test_numbers_in_yaml_with_an_exponent_and_no_point(tmp_path):
    """YAML 1.1 reads 1e-6 as text."""
    (tmp_path / "run.yaml").write_text(json.dumps(tree())[:-1] + ', "actor": {"optimizer": {"lr": 1e-6}}}')
    assert load_config(tmp_path / "run.yaml").actor.optimizer.lr == 1e-6


def test_files_that_cannot_be_read_are_named(tmp_path):
    assert "nowhere.yaml' does not exist" in refusal(tmp_path / "nowhere.yaml")
    for content, says in (("a: [", "not valid YAML"), ("- a\n- b\n", "must be a mapping"), ("", "must be a mapping")):
        (tmp_path / "bad.yaml").write_text(content)
        assert says in refusal(tmp_path / "bad.yaml")


def test_yaml_makes_no_objects(tmp_path):
    (tmp_path / "evil.yaml").write_text("name: !!python/object/apply:os.getcwd []\n")
    assert "not valid YAML" in refusal(tmp_path / "evil.yaml")
    assert load_config(tree(), ["name=plain"]).name == "plain"
    override = "name=!!python/object/apply:os.getcwd []"
    assert f"override {override!r} is not valid YAML" in refusal(tree(), (override,))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["total_epochs=1"], "exactly one of total_steps and total_epochs"),
        (["total_steps=null"], "exactly one of total_steps and total_epochs"),
        (["rollout.top_p=0.9"], "set algorithm.correction.mode, or top_p=1 and top_k=0"),
        (["rollout.top_k=5"], "set algorithm.correction.mode, or top_p=1 and top_k=0"),
        (["reward.backend=grpc"], "reward.backend=grpc needs reward.endpoint"),
        (["reward.backend=http"], "reward.backend=http needs reward.endpoint"),
        (["reward.backend=model"], "reward.backend=model needs reward.model"),
        (["reward.function=null"], "reward.backend=function needs reward.function"),
        (["reward.backend=agents"], "agents give rewards where rollout.agents is true"),
        (["rollout.agents=true"], "rollout.agents needs rollout.context"),
        (
            ["rollout.agents=true", "rollout.context=64", "algorithm.overlong_buffer=4"],
            "algorithm.overlong_buffer=4 is about single answers",
        ),
        (["actor.optimizer.schedule=cosine"], "schedule=cosine needs optimizer.total_steps"),
        (["critic.optimizer.schedule=linear"], "schedule=linear needs optimizer.total_steps"),
        (["actor.parallel.pp=2", "actor.micro_batch_tokens=auto"], "actor.parallel.pp=2 has several passes under way"),
        (["critic.parallel.pp=3", "critic.micro_batch_tokens=auto"], "set micro_batch_tokens to a number"),
        (["reference_parallel.pp=2", "actor.micro_batch_tokens=auto"], "reference_parallel.pp=2 has several passes"),
    ],
)
def test_rules_over_several_keys(overrides, says):
    assert says in refusal(tree(), tuple(overrides))


def test_what_the_rules_ask_for_is_accepted():
    load_config(tree(), ["rollout.top_p=0.9", "algorithm.correction.mode=decoupled"])
    load_config(tree(), ["reward.backend=grpc", "reward.endpoint=host:1"])
    load_config(tree(), ["actor.optimizer.schedule=cosine", "actor.optimizer.total_steps=10"])
    load_config(tree(), ["total_steps=null", "total_epochs=2"])
    load_config(tree(), ["critic.parallel.pp=2", "actor.micro_batch_tokens=auto"])


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.floats(0.01, 5), st.text(max_size=5), st.dictionaries(st.text(max_size=5), anything, max_size=3))
def test_dumped_and_loaded_again_is_the_same(temperature, name, options):
    """Every role gets the configuration as this text."""
    source = merged(tree(), {"name": name, "rollout": {"temperature": temperature}}) | {"options": options}
    config = load_config(source)
    assert load_config(dump_config(config)) == config


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.temperature=.inf"], "rollout.temperature: inf is not a finite number"),
        (["options.mine=[1, {deep: .nan}]"], "options.mine.1.deep: nan is not a finite number"),
        (["actor.optimizer.lr=inf"], "actor.optimizer.lr: Input should be a finite number (got 'inf')"),
    ],
)
def test_numbers_that_json_has_not_are_named(overrides, says):
    assert refusal(tree(), tuple(overrides)) == says


def test_a_configuration_is_immutable():
    with pytest.raises(ValueError, match="frozen"):
        load_config(tree()).actor.optimizer.lr = 1  # type: ignore[misc]


def test_the_failure_policy_is_given_in_the_words_of_the_product() -> None:
    policy = {"max_retries": 3, "backoff": 1.5}
    saving = {"auto_save": True, "save_interval": 1000}
    config = load_config({**tree(), "recovery": policy, "checkpoint": saving})
    assert config.recovery.model_dump().items() >= policy.items()
    assert config.checkpoint.model_dump().items() >= saving.items()
    assert load_config(tree()).recovery == config.recovery, "these are the defaults"
    assert load_config(tree()).checkpoint == config.checkpoint
