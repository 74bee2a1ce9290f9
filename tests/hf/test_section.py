"""The recipe's `model` section, and how its mistakes are worded."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import pytest
from pydantic import ValidationError
from tests.hf import tiny

from trainforge.errors import ConfigError
from trainforge_plugins.hf import ModelSection, build, forge_model


def _build(tmp_path, **section):
    return build(tiny.context(tmp_path), ModelSection(**section))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "say which model to train"),
        ({"hf": "a", "factory": "b:c"}, "give one of hf, config and factory, not hf and factory"),
        ({"config": {"hidden_size": 4}}, "needs model_type"),
        ({"factory": "no_function"}, "package.module:function"),
        ({"hf": "a", "attn": "fast"}, "attn"),
        ({"hf": "a", "tokenizer": "x"}, "tokenizer"),
    ],
)
def test_section_mistakes(section, message):
    with pytest.raises(ValidationError, match=message):
        ModelSection(**section)


def test_it_is_the_default():
    provider = forge_model()
    assert provider.default
    assert provider.config is ModelSection


def test_importing_the_plugin_is_cheap():
    code = (
        "import sys, trainforge_plugins.hf; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_unknown_architecture_and_key(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown model_type 'qwen3_mo'; did you mean qwen3_moe\?"):
        _build(tmp_path, config={"model_type": "qwen3_mo"})
    with pytest.raises(ConfigError, match=r"llama has no key 'hiden_size'; did you mean hidden_size\?"):
        _build(tmp_path, config={"model_type": "llama", "hiden_size": 32})
    with pytest.raises(ConfigError, match="no causal language model"):
        _build(tmp_path, config={"model_type": "t5"})


def test_values_that_do_not_fit(tmp_path):
    with pytest.raises(ConfigError, match="hidden_size"):
        _build(tmp_path, config=tiny.values("llama", hidden_size="wide"))
    with pytest.raises(ConfigError, match=r"33.*4|divisible|multiple"):
        _build(tmp_path, config=tiny.values("llama", hidden_size=33))


@pytest.mark.parametrize(
    ("family", "sizes", "says"),
    [
        (
            "qwen2",
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        ("qwen3_moe", {"num_key_value_heads": 8}, "num_key_value_heads 8"),
        ("qwen2", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("gpt2", {"n_layer": 0}, "n_layer is 0"),
        ("qwen2", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("qwen2", {"hidden_size": 30, "num_key_value_heads": 4}, "hidden_size 30 .* heads of 7 channels"),
        ("mixtral", {"num_experts_per_tok": 5}, "sent to 5 experts, but there are only 4"),
    ],
)
def test_sizes_that_would_only_fail_in_the_first_step(tmp_path, family, sizes, says):
    with pytest.raises(ConfigError, match=says):
        tiny.model(tmp_path, family, **sizes)


def test_kernels_that_cannot_be_had(tmp_path):
    with pytest.raises(ConfigError, match="pip install flash-attn"):
        _build(tmp_path, config=tiny.values("llama"), attn="flash_attention_2")
    with pytest.raises(ConfigError, match="sdpa cannot soft-cap"):
        _build(tmp_path, config=tiny.values("gemma2"), attn="sdpa")


def test_router_loss_of_a_model_without_one(tmp_path):
    folder = tmp_path / "model"
    tiny.transformers_model("llama").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "output_router_logits": True}))
    with pytest.raises(ConfigError, match="no auxiliary loss"):
        tiny.folder_model(tmp_path, folder)


def test_a_whole_config_json_may_be_given(tmp_path):
    """People copy config.json of a released model into the recipe."""
    folder = tmp_path / "model"
    tiny.transformers_model("llama").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"torch_dtype": "bfloat16", "_name_or_path": "somewhere", "pretraining_tp": 1}
    assert _build(tmp_path, config=config).vocab_size == tiny.VOCAB


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c"])
def test_folder_that_is_not_there(tmp_path, name):
    with pytest.raises(ConfigError, match="there is no folder"):
        _build(tmp_path, hf=name)


def test_folder_without_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        _build(tmp_path, hf=str(tmp_path))
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match=r"config\.json"):
        _build(tmp_path, hf=str(tmp_path))


def test_unreachable_hub_is_one_sentence_within_seconds(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise OSError("network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(ConfigError, match="nobody/no-such-model is no folder here and cannot be fetched"):
        _build(tmp_path, hf="nobody/no-such-model")
    assert sum(waits) < 15, "what is tried again is not waited for long"


def test_a_folder_needs_no_network(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    tiny.transformers_model("llama").save_pretrained(folder)

    def refused(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)
    tiny.initial(tiny.folder_model(tmp_path, folder))
