"""Settings: `pytest tests/test_config.py`."""

from dataclasses import dataclass, fields

import pytest

from workbench.config import EngineConfig, build
from workbench.errors import UserError


@dataclass(frozen=True)
class Grid:
    ranks: tuple
    temperature: float = 1.0
    name: str | None = None


def test_defaults_are_the_demo_in_float32():
    config = EngineConfig()
    assert (config.base, config.dtype, config.device, config.max_len) == ("demo", "float32", None, None)


def test_mapping_and_keywords_make_the_same_config():
    values = {"base": "org/name", "dtype": "bfloat16", "max_requests": 3, "device": "cuda:1"}
    assert EngineConfig.from_mapping(values) == EngineConfig(**values)


def test_unknown_key_names_the_nearest():
    with pytest.raises(UserError, match="unknown key 'max_request'; did you mean 'max_requests'"):
        EngineConfig.from_mapping({"max_request": 3})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dtype", "bfloat", r"'dtype' is 'bfloat', expected one of .*did you mean 'bfloat16'"),
        ("dtype", 16, "'dtype' is 16, expected a text"),
        ("device", "cude", "'device' is 'cude', expected 'cpu', 'cuda' or 'cuda:N'; did you mean 'cuda'"),
        ("max_requests", True, "'max_requests' is True, expected a whole number"),
        ("max_requests", 2.0, "'max_requests' is 2.0, expected a whole number"),
        ("max_requests", 0, "'max_requests' is 0, expected at least 1"),
        ("max_rows_per_step", -1, "'max_rows_per_step' is -1"),
        ("max_len", "long", "'max_len' is 'long', expected a whole number or nothing"),
        ("max_len", 0, "'max_len' is 0"),
        ("row_padding", -8, "'row_padding' is -8, expected at least 0"),
        ("attention", "flash", "'attention' is 'flash', expected one of 'auto', 'reference'"),
        ("base", " ", "'base' is empty"),
        ("base", None, "'base' is None, expected a text"),
        ("offline", 1, "'offline' is 1, expected true or false or nothing"),
        ("trust_remote_code", "yes", "'trust_remote_code' is 'yes', expected true or false"),
        ("seed", -1, "'seed' is -1, expected from 0 to"),
    ],
)
def test_bad_value_is_named(key, value, message):
    with pytest.raises(UserError, match=message):
        EngineConfig(**{key: value})
    with pytest.raises(UserError, match=message):
        EngineConfig.from_mapping({key: value})


def test_every_field_refuses_a_value_of_another_kind():
    for item in fields(EngineConfig):
        with pytest.raises(UserError, match=repr(item.name)):
            EngineConfig.from_mapping({item.name: object()})


def test_change_keeps_the_rest_and_checks_the_new():
    config = EngineConfig(base="org/name", token="hf_secret")
    assert config.change(max_len=9) == EngineConfig(base="org/name", token="hf_secret", max_len=9)
    with pytest.raises(UserError, match="unknown key 'max_lne'; did you mean 'max_len'"):
        config.change(max_lne=9)
    with pytest.raises(UserError, match="'dtype' is 'float8'"):
        config.change(dtype="float8")


def test_token_stays_out_of_the_repr():
    assert "hf_secret" not in repr(EngineConfig(token="hf_secret"))


def test_toml_table_makes_the_config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[engine]\nbase = "org/name"\nmax_len = 128\n[other]\nx = 1\n')
    assert EngineConfig.from_toml(path) == EngineConfig(base="org/name", max_len=128)
    with pytest.raises(UserError, match=r"no table \[engin\]; did you mean 'engine'"):
        EngineConfig.from_toml(path, section="engin")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[engine\n", r"not valid TOML: .*line 1"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[engine]\nbatch = 3\n", r"\[engine\] of .* unknown key 'batch'"),
        (b"engine = 3\n", "expected a table of settings"),
    ],
)
def test_bad_toml_is_a_sentence(tmp_path, content, message):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        EngineConfig.from_toml(path)


def test_missing_toml_is_named(tmp_path):
    with pytest.raises(UserError, match="run.toml' cannot be read: No such file"):
        EngineConfig.from_toml(tmp_path / "run.toml")


def test_build_serves_other_dataclasses():
    assert build(Grid, {"ranks": (1, 2), "temperature": 1}, "grid") == Grid((1, 2), 1)
    with pytest.raises(UserError, match="grid has an unknown key 'rank'; did you mean 'ranks'"):
        build(Grid, {"rank": (1,)}, "grid")
    with pytest.raises(UserError, match="grid: 'temperature' is True, expected a number"):
        build(Grid, {"ranks": (), "temperature": True}, "grid")


def test_build_names_a_setting_that_is_missing():
    with pytest.raises(UserError, match="grid lacks 'ranks'"):
        build(Grid, {}, "grid")
