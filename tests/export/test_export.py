"""What `forge export` writes is read by transformers itself: all keys, the same logits, the same tokens."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.hf import tiny
from tests.run.runs import MODEL, write_recipe
from torch import nn

import trainforge
from trainforge.context import SilentConsole
from trainforge.errors import CheckpointError, TrainForgeError, UserError
from trainforge.exporting import export_run
from trainforge_plugins.hf import safetensors_files

FAMILIES = [
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text"),
    *("deepseek_v3", "gpt_oss", "phi3", "falcon_h1", "qwen3_next"),
]


def trained(folder: Path, model: dict, **sections) -> Path:
    """A run folder after two steps."""
    sections["train"] = {"steps": 2} | sections.get("train", {})
    recipe = write_recipe(folder, model=model, **sections)
    assert trainforge.run(recipe, run_dir=folder / "run") == 0
    return folder / "run"


def exported(run: Path, out: Path, **options) -> Path:
    export_run(run, out, SilentConsole(), **options)
    return out


def reloaded(out: Path, dtype=torch.float32):
    """The model as transformers reads it; nothing may be missing, left over or of another shape."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        out, dtype=dtype, output_loading_info=True, attn_implementation="eager", local_files_only=True
    )
    assert not any(info.values()), info
    return model.eval()


def masters(run: Path) -> dict[str, torch.Tensor]:
    """Masters and buffers as the checkpoint's files hold them, read by torch's own loader."""
    from torch.distributed.checkpoint import load

    from trainforge_plugins.dcp.reading import CheckpointReader

    (path,) = (run / "checkpoints").glob("step-*")
    reader = CheckpointReader(path)
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(("memory/master/", "memory/buffer/"))
    }
    load(wanted, storage_reader=reader, no_dist=True)
    return {name.split("/", 2)[2]: tensor for name, tensor in wanted.items()}


def of_the_run(run: Path, values: dict):
    """transformers' model of the same configuration, with the checkpoint's weights put in by name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**copy.deepcopy(values))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    stored, filled = masters(run), set()
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in stored:
                tensor.copy_(stored[name].view(tensor.shape))
                filled |= {
                    name for name, other in model.state_dict(keep_vars=True).items() if other is tensor
                }
    assert filled == set(model.state_dict())
    return model


def logits(model) -> torch.Tensor:
    ids = torch.randint(0, 250, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids).logits


def stored_keys(out: Path) -> dict[str, tuple[int, ...]]:
    keys: dict[str, tuple[int, ...]] = {}
    for file in out.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            keys |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    return keys


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_reload_gives_equal_logits(tmp_path, family):
    values = tiny.values(family, vocab_size=264)
    packing = {"text": {"max_len": 32}} if family != "falcon_h1" else {}
    run = trained(tmp_path, {"config": values}, **packing)
    out = exported(run, tmp_path / "out", dtype="fp32")
    ours, expected = reloaded(out), of_the_run(run, values)
    assert torch.equal(logits(ours), logits(expected))
    expected.save_pretrained(tmp_path / "theirs")
    assert stored_keys(out) == stored_keys(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text()) == json.loads((tmp_path / "theirs" / name).read_text())


# ------------------------------------------------------------------------------------------------- how it is written


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A small run with tied weights and the byte tokenizer."""
    return trained(tmp_path_factory.mktemp("tied"), {"config": MODEL})


def test_bf16_is_rounded_as_the_working_copies_are(run, tmp_path):
    out = exported(run, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    state, stored = reloaded(out, dtype="auto").state_dict(), masters(run)
    for name, master in stored.items():
        bits = master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        expected = ((bits + 0x8000) >> 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
        assert torch.equal(state[name].view(-1).view(torch.int16), expected.view(torch.int16)), name


def test_shards_and_their_index(run, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_files, "SHARD_BYTES", 20_000)
    out = exported(run, tmp_path / "out", dtype="fp32")
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 2
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == 4 * sum(tensor.numel() for tensor in masters(run).values())
    assert torch.equal(logits(reloaded(out)), logits(of_the_run(run, MODEL)))


def test_wider_types_lie_aligned_before_narrower_ones(tmp_path):
    values = {
        "odd": torch.tensor([1.5, 2.5, -3.0], dtype=torch.bfloat16),
        "wide": torch.arange(5),
        "number": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
        "turned": torch.arange(6.0).view(2, 3).T,
    }
    layouts = {key: safetensors_files.Layout(tuple(v.shape), v.dtype) for key, v in values.items()}
    files = safetensors_files.SafetensorsFiles(tmp_path, layouts, {"format": "pt"})
    for key in reversed(values):
        files.write(key, values[key])
    files.close()
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert all(torch.equal(opened.get_tensor(key), value) for key, value in values.items())


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_stored_once_and_an_untied_head_always(tmp_path, tied):
    values = MODEL | {"tie_word_embeddings": tied}
    out = exported(trained(tmp_path, {"config": values}), tmp_path / "out", dtype="fp32")
    keys = stored_keys(out)
    assert ("lm_head.weight" in keys) is not tied
    assert "model.embed_tokens.weight" in keys
    model = reloaded(out)
    same = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert same is tied
    # masters are views of one slab: each key has its own bytes only
    assert (out / "model.safetensors").stat().st_size < 4 * sum(map(elements, keys.values())) + 8192


def elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


class TiedToy(nn.Module):
    """A language model that is no transformers model, its head tied to its embedding."""

    vocab_size = 264

    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(self.vocab_size, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.head = nn.Linear(width, self.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def hidden(self, batch):
        hidden = self.embedding(batch.input_ids) * self.scale
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return hidden


def tied_toy(ctx):
    return TiedToy()


def test_a_tied_module_of_the_users_own(tmp_path):
    from safetensors.torch import load_model

    run = trained(tmp_path, {"config": None, "factory": f"{__name__}:tied_toy"})
    out = exported(run, tmp_path / "out", dtype="fp32", trust_code=True)
    with safe_open(out / "model.safetensors", framework="pt") as opened:
        assert json.loads(opened.metadata()["aliases"]) == {"head.weight": "embedding.weight"}
        assert "head.weight" not in opened.keys()  # noqa: SIM118
    toy, stored = TiedToy(), masters(run)
    load_model(toy, str(out / "model.safetensors"), strict=True)
    assert toy.head.weight is toy.embedding.weight
    assert all(torch.equal(value.view(-1), stored[name].view(-1)) for name, value in toy.named_parameters())


def test_it_starts_from_a_folder_and_keeps_that_folders_tokenizer_and_generation_config(tmp_path):
    source = folder_with_tokenizer(tmp_path / "source")
    run = trained(tmp_path, {"hf": str(source), "config": None}, text={"max_len": 16})
    out = exported(run, tmp_path / "out", dtype="fp32")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert stored_keys(out) == stored_keys(source)
    again = trained(tmp_path / "again", {"hf": str(out), "config": None}, text={"max_len": 16})
    assert reloaded(exported(again, tmp_path / "out2")) is not None


def folder_with_tokenizer(folder: Path) -> Path:
    """A model folder with a word-piece of a tokenizer and generation settings of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    tiny.transformers_model("qwen3_moe", vocab_size=300).save_pretrained(folder)
    GenerationConfig(do_sample=True, temperature=0.3, top_p=0.5).save_pretrained(folder)
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<unk>", "</s>"])
    backend.train_from_iterator(["the whale number swam by 0 1 2 3 4 5 6 7 8 9 : ."], trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    return folder


def test_the_byte_tokenizer_becomes_one_that_transformers_reads(run, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported(run, tmp_path / "out"), local_files_only=True)
    for text in ("a \t\n  whale", "é ∞ \U0001f40b \x00\x7f", "".join(map(chr, range(300)))):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (256, 257)


def test_the_card_names_recipe_step_and_digest(run, tmp_path):
    digest = export_run(run, tmp_path / "out", SilentConsole())
    assert digest == json.loads((run / "summary.json").read_text())["weights_digest"]
    card = (tmp_path / "out/README.md").read_text()
    assert digest in card
    assert "step 2" in card
    assert (run / "recipe.yaml").read_text().strip() in card


def test_one_tensor_of_the_checkpoint_at_a_time(run, tmp_path, monkeypatch):
    from trainforge_plugins.dcp.checkpoint import DcpCheckpoint
    from trainforge_plugins.hf.spec import HuggingFaceModel

    restore, asked = DcpCheckpoint.restore, []

    def watching(self, parts, path):
        asked.append([named.extent.name for part in parts.values() for named in part.state().tensors])
        restore(self, parts, path)

    monkeypatch.setattr(DcpCheckpoint, "restore", watching)
    monkeypatch.setattr(HuggingFaceModel, "load", lambda *args: pytest.fail("nothing here is frozen"))
    exported(run, tmp_path / "out")
    assert sorted(name for (name,) in asked) == sorted(masters(run))


def test_an_earlier_step(tmp_path):
    run = trained(tmp_path, {"config": MODEL}, train={"save_every": 1})
    first = export_run(run, tmp_path / "first", SilentConsole(), step=1)
    assert first != export_run(run, tmp_path / "second", SilentConsole(), step=2)
    assert "step 1." in (tmp_path / "first/README.md").read_text()


# ------------------------------------------------------------------------------------------------- what is refused


def test_a_folder_that_is_not_empty_is_refused_and_kept_with_force(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    exported(run, out)  # an empty one is taken
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="--force"):
        exported(run, out)
    exported(run, out, force=True)
    assert not (out / "mine.txt").exists()
    assert (tmp_path / "out.old-1/mine.txt").read_text() == "mine"
    with pytest.raises(UserError, match="is a file"):
        exported(run, out / "README.md", force=True)


def test_a_damaged_checkpoint_leaves_nothing(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    data = max((tmp_path / "run/checkpoints").glob("step-*/*"), key=lambda path: path.stat().st_size)
    with data.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.truncate()
    with pytest.raises(CheckpointError, match=data.name):
        exported(tmp_path / "run", tmp_path / "out/deep")
    assert not any((tmp_path / "out").iterdir())


def test_frozen_parameters_are_the_initial_ones(tmp_path):
    source = tmp_path / "source"
    tiny.transformers_model("llama", vocab_size=264).save_pretrained(source)
    run = trained(
        tmp_path,
        {"hf": str(source), "config": None, "freeze": ["*embed_tokens*"]},
        text={"tokenizer": "bytes"},
    )
    before, after = reloaded(source).state_dict(), reloaded(exported(run, tmp_path / "out", dtype="fp32"))
    for name, value in after.state_dict().items():
        assert torch.equal(value, before[name]) is ("embed_tokens" in name), name


def test_a_disk_that_fills_is_said_and_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(safetensors_files.SafetensorsFiles, "write", full)
    with pytest.raises(
        TrainForgeError, match=r"out cannot be written \(No space left on device\): make room"
    ) as caught:
        exported(run, tmp_path / "out")
    assert type(caught.value) is TrainForgeError
    assert list(tmp_path.iterdir()) == []
