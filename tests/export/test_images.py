"""An exported image-text-to-text model is read by transformers: all keys, the same logits on images."""

import json

import pytest
import torch
from tests.export.test_export import stored_keys
from tests.families.test_images import FAMILIES, run_on_rows
from tests.hf import seeing, tiny
from tests.run.test_equivalence import weights_of
from transformers import AutoModelForImageTextToText

from trainforge.context import SilentConsole
from trainforge.exporting import export_run


def logits(model, family):
    ids, real, inputs = seeing.rows(family, seed=8)
    types = seeing.token_types(family, ids)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=real, **inputs, **types).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_reload_gives_equal_logits_on_images(tmp_path, family):
    trained = run_on_rows(tmp_path, family, steps=2)
    out = tmp_path / "out"
    export_run(trained.folder, out, SilentConsole(), dtype="fp32")
    ours, info = AutoModelForImageTextToText.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True, attn_implementation="eager", local_files_only=True
    )
    assert not any(info.values()), info
    expected = seeing.transformers_model(family)
    missing, unexpected = expected.load_state_dict(weights_of(trained.folder), strict=False)
    assert not unexpected
    assert not set(missing) & {name for name, _ in expected.named_parameters()}
    assert torch.equal(logits(ours.eval(), family), logits(expected, family))
    expected.save_pretrained(tmp_path / "theirs")
    assert stored_keys(out) == stored_keys(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text()) == json.loads((tmp_path / "theirs" / name).read_text())

    spec = tiny.folder_model(tmp_path, out)  # and training may go on from it
    state, final = tiny.initial(spec), weights_of(trained.folder)
    assert state.keys() == final.keys()
    assert all(torch.equal(state[name], final[name]) for name in final)
