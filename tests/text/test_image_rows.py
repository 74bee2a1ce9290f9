"""Rows with images: equal to what the model's own processor makes of them; labels; rows that cannot be used."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.text.helpers import text_data, write_jsonl
from tests.text.vision_folders import (
    llava_folder,
    llava_processor,
    picture,
    qwen_folder,
    qwen_processor,
)

from trainforge.errors import ConfigError, DataError
from trainforge.stages import IGNORED, Batch
from trainforge_plugins.text.conversation import BadRow
from trainforge_plugins.text.data import TextData
from trainforge_plugins.text.labels import Rendered, Turn

ASK = "What is in this picture?"
PAD, VISION_START, VISION_END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_folder(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava_folder(tmp_path_factory.mktemp("llava"))


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """A folder with pictures of several sizes and kinds."""
    picture(tmp_path / "wide.png", 80, 60)
    picture(tmp_path / "tall.jpg", 50, 90, 1)
    picture(tmp_path / "sub/square.png", 64, 64, 2)
    return tmp_path


def row(question: str, images: list[Any] | None = None, answer: str = "A red square.") -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns} if images is None else {"messages": turns, "images": images}


def image_data(folder: Path, model: Path, rows: list[Any], **options: Any) -> TextData:
    facts = {key: options.pop(key) for key in ("micro", "accumulate", "world", "rank") if key in options}
    path = write_jsonl(folder / "rows.jsonl", rows)
    section = {"max_len": 256, "shuffle": False, "tokenizer": str(model), **options}
    return text_data(folder / "run", str(path), section=section, vocab_size=400, **facts)


def batches(data: TextData, count: int) -> list[Batch]:
    found = [batch for _ in range(count) for batch in data.take(1)]
    data.close()
    return found


def own_ids(batch: Batch, number: int = 0) -> list[int]:
    """The tokens of a row that are not padding."""
    ids: list[int] = batch.input_ids[number].tolist()
    return ids if batch.document_ids is None else ids[: int((batch.document_ids[number] >= 0).sum())]


TALK: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "One"},
            {"type": "image", "path": "wide.png"},
            {"type": "text", "text": " two "},
            {"type": "image", "path": "tall.jpg"},
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
    {
        "role": "user",
        "content": [{"type": "image", "path": "sub/square.png"}, {"type": "text", "text": ASK}],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "A red square."}]},
]


@pytest.mark.parametrize("kind", ["qwen", "llava"])
def test_tokens_and_pixels_are_those_of_the_processors_own_call(
    kind: str, shots: Path, request: pytest.FixtureRequest
):
    model = request.getfixturevalue(kind)
    own = qwen_processor(model) if kind == "qwen" else llava_processor(model)
    whole = [
        {
            **turn,
            "content": [
                {**part, "path": str(shots / part["path"])} if "path" in part else part
                for part in turn["content"]
            ],
        }
        for turn in TALK
    ]
    expected = own.apply_chat_template(
        whole, tokenize=True, return_dict=True, processor_kwargs={"return_tensors": "pt"}
    )
    (batch,) = batches(image_data(shots, model, [{"messages": TALK}]), 1)

    assert own_ids(batch) == expected["input_ids"][0].tolist()
    further = {"pixel_values", "image_grid_thw"} if kind == "qwen" else {"pixel_values"}
    assert set(batch.inputs) == further
    for name in further:
        assert torch.equal(batch.inputs[name], expected[name])
    assert batch.inputs["pixel_values"].abs().sum() > 0


def test_labels_by_hand(shots: Path, qwen: Path):
    data = image_data(shots, qwen, [row(f"<image>{ASK}", ["wide.png"])])
    (batch,) = batches(data, 1)

    tokens = [data.tokenizer.show([token]) for token in own_ids(batch)]
    # 80 x 60 is 84 x 56 in patches of 14: 6 x 4 of them, and one token for 2 x 2
    before = data.tokenizer.encode_with_ends(
        f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{VISION_START}", []
    )[0]
    assert tokens[len(before) : len(before) + 7] == [PAD] * 6 + [VISION_END]
    answer = [*data.tokenizer.encode(b"A red square.").tolist(), data.tokenizer.end]
    labels = batch.labels[0].tolist()
    start = len(tokens) - 1 - len(answer) - 1  # a line break follows the end token
    assert tokens[-1] == "\n"
    assert labels == [IGNORED] * start + answer + [IGNORED] * 2
    assert batch.supervised == len(answer)


def test_learning_everything_leaves_images_out(shots: Path, qwen: Path):
    data = image_data(shots, qwen, [row(f"<image>{ASK}", ["wide.png"])], train_on="all")
    (batch,) = batches(data, 1)

    ids, labels = own_ids(batch), batch.labels[0].tolist()
    (pad,) = data.tokenizer.encode(PAD.encode()).tolist()
    assert ids.count(pad) == 6
    assert labels == [IGNORED if token == pad else token for token in ids[1:]] + [IGNORED]


def as_data(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "a mark and a column": lambda folder: row(f"<image>{ASK}", ["wide.png"]),
    "one path that is no list": lambda folder: {**row(f"<image>{ASK}"), "images": "wide.png"},
    "the column of Llava": lambda folder: {**row(f"<image>{ASK}"), "image": "wide.png"},
    "bytes as parquet has them": lambda folder: row(
        f"<image>{ASK}", [{"base64": base64.b64encode((folder / "wide.png").read_bytes()).decode()}]
    ),
    "an absolute path": lambda folder: row(f"<image>{ASK}", [str(folder / "wide.png")]),
    "alpaca": lambda folder: {
        "instruction": f"<image>{ASK}",
        "output": "A red square.",
        "images": ["wide.png"],
    },
    "sharegpt": lambda folder: {
        "conversations": [
            {"from": "human", "value": f"<image>{ASK}"},
            {"from": "gpt", "value": "A red square."},
        ],
        "images": ["wide.png"],
    },
    **{
        f"a part with {part}": lambda folder, part=part: {  # type: ignore[misc]
            "messages": [
                {
                    "role": "user",
                    "content": [
                        json.loads(part.replace("DATA", as_data(folder / "wide.png"))),
                        {"type": "text", "text": ASK},
                    ],
                },
                {"role": "assistant", "content": "A red square."},
            ],
            **({"images": ["wide.png"]} if part == '{"type": "image"}' else {}),
        }
        for part in (
            '{"type": "image", "path": "wide.png"}',
            '{"type": "image", "image": "wide.png"}',
            '{"type": "image_url", "image_url": {"url": "wide.png"}}',
            '{"type": "image_url", "image_url": "file://./wide.png"}',
            '{"type": "image_url", "image_url": {"url": "DATA"}}',
            '{"type": "image"}',
        )
    },
}


def test_all_ways_to_name_an_image_are_the_same(shots: Path, qwen: Path):
    data = image_data(shots, qwen, [make(shots) for make in WAYS.values()], micro=len(WAYS))
    assert data.ledger()["skipped"] == {}
    (batch,) = batches(data, 1)

    ids = [own_ids(batch, number) for number in range(len(WAYS))]
    assert all(found == ids[0] for found in ids)
    pixels = batch.inputs["pixel_values"].reshape(len(WAYS), -1)
    assert bool((pixels == pixels[0]).all())


def test_a_registry_names_the_column_and_lies_with_the_images(shots: Path, qwen: Path):
    entry = {
        "file_name": "deep/rows.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "images": "shots"},
    }
    (shots / "dataset_info.json").write_text(json.dumps({"shots": entry}))
    (shots / "deep").mkdir()
    talk = [{"from": "human", "value": f"<image>{ASK}"}, {"from": "gpt", "value": "Yes."}]
    write_jsonl(shots / "deep/rows.jsonl", [{"talk": talk, "shots": ["sub/square.png"]}])
    section = {"dataset": "shots", "dataset_dir": str(shots), "max_len": 256, "tokenizer": str(qwen)}
    data = text_data(shots / "run", None, section=section, vocab_size=400)
    (batch,) = batches(data, 1)
    assert batch.inputs["image_grid_thw"].tolist() == [[1, 4, 4]]  # 64 pixels become 56: 4 patches


def test_images_of_another_folder(shots: Path, qwen: Path):
    rows = [row(f"<image>{ASK}", ["square.png"])]
    with pytest.raises(DataError, match="none of the 1 rows"):
        image_data(shots, qwen, rows)
    data = image_data(shots, qwen, rows, image_dir=str(shots / "sub"))
    assert data.ledger()["used"] == 1
    data.close()


def test_image_dir_without_conversations_is_refused(tmp_path: Path, qwen: Path):
    with pytest.raises(ConfigError, match=r"text\.image_dir is for conversations"):
        image_data(tmp_path, qwen, [{"text": "no conversation"}], image_dir=str(tmp_path))


def test_image_dir_without_any_image_is_refused(tmp_path: Path, qwen: Path):
    with pytest.raises(ConfigError, match="but no row that can be used has an image"):
        image_data(tmp_path, qwen, [row("Hi")], image_dir=str(tmp_path))


def test_places_move_with_what_an_image_becomes():
    text = "u:#a#b."
    rendered = Rendered(text, ((0, (3, 4)), (0, (5, 6))), ((1, Turn(3, 6, 7)),))
    whole, images = rendered.expanded("#", ["<1234>", ""])
    assert whole.text == "u:<1234>ab."
    assert images == [(2, 8), (9, 9)]
    assert [whole.text[start:stop] for _, (start, stop) in whole.contents] == ["a", "b"]
    assert whole.turns == ((1, Turn(8, 10, 11)),)
    with pytest.raises(BadRow, match="2 # for 1 images"):
        rendered.expanded("#", ["x"])


def test_text_rows_share_rows_and_images_do_not(shots: Path, qwen: Path):
    texts = [row(f"Say {number}.", answer="yes") for number in range(4)]
    shown = [row(f"<image>{ASK}", [name]) for name in ("wide.png", "tall.jpg")]
    rows = [texts[0], shown[0], texts[1], texts[2], shown[1], texts[3]]
    data = image_data(shots, qwen, rows, micro=3)
    (batch,) = batches(data, 1)

    assert batch.document_ids is not None
    documents = [
        sorted({*batch.document_ids[number].tolist()} - {-1}) for number in range(len(batch.input_ids))
    ]
    assert documents == [[0, 1, 2, 3], [0], [0]]  # by their first document
    assert batch.inputs["image_grid_thw"].tolist() == [[1, 4, 6], [1, 6, 4]]  # 56 x 84 and 84 x 56 pixels
    assert batch.inputs["pixel_values"].shape == (48, 1176)
    assert "2 have images, each in a row of its own" in "".join(data.start_report())


def test_a_batch_of_texts_has_no_further_inputs(shots: Path, qwen: Path):
    data = image_data(shots, qwen, [row("Hi", answer="yes"), row("<image>Hi", ["wide.png"])], packing=False)
    first, second = batches(data, 2)
    assert first.inputs == {}
    assert set(second.inputs) == {"pixel_values", "image_grid_thw"}


def bomb(folder: Path) -> None:
    """A PNG whose header promises 30,000 x 30,000 pixels."""
    picture(folder / "bomb.png", 8, 8)
    raw = bytearray((folder / "bomb.png").read_bytes())
    raw[16:24] = (30_000).to_bytes(4, "big") * 2
    import zlib

    raw[29:33] = zlib.crc32(bytes(raw[12:29])).to_bytes(4, "big")
    (folder / "bomb.png").write_bytes(bytes(raw))


def test_each_kind_of_bad_row_is_listed_with_its_reason(shots: Path, qwen: Path):
    bomb(shots)
    (shots / "cut.jpg").write_bytes((shots / "tall.jpg").read_bytes()[:300])
    (shots / "text.png").write_text("no image")
    (shots / "empty.png").write_bytes(b"")
    header = b"GIF89a" + bytes(2) + bytes([1, 0]) + bytes(3)
    (shots / "flat.gif").write_bytes(header + b"," + bytes(4) + bytes(2) + bytes([1, 0]) + b"\0\2\0;")
    picture(shots / "thread.png", 900, 2)
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    bad: list[tuple[dict[str, Any], str, str]] = [
        (row("<image>a", ["gone.png"]), "an image cannot be used", "gone.png: No such file"),
        (row("<image>b", ["cut.jpg"]), "an image cannot be used", "cut.jpg: it is damaged"),
        (row("<image>c", ["text.png"]), "an image cannot be used", "text.png: it is no image"),
        (row("<image>d", ["empty.png"]), "an image cannot be used", "empty.png: it is no image"),
        (row("<image>e", ["bomb.png"]), "an image cannot be used", "bomb.png: it has more than 89,478,485"),
        (row("<image>f", ["flat.gif"]), "an image cannot be used", "flat.gif: it"),
        (row("<image>g", ["sub"]), "an image cannot be used", "sub: Is a directory"),
        (row("<image><image>h", ["wide.png"]), "the number of <image> marks", "marks: 2, images: 1"),
        (row("i", ["wide.png"]), "the number of <image> marks", "marks: 0, images: 1"),
        (row("<image>j", []), "the number of <image> marks", "marks: 1, images: 0"),
        (row("k", ["wide.png"], "<image>"), "an image in an assistant's turn", ""),
        (row("<image>l", ["thread.png"]), "the model's processor refuses its images", "aspect ratio"),
        (row("<image>m", [7]), "'images' names no image", "a number"),
        (row("<image>n", ["data:image/png;base64,%%"]), "an image in a data: address that is not", ""),
        (row([part], None), "an image at an address, which is not fetched", "https://example.org/a.png"),  # type: ignore[arg-type]
        (row("<image>o" + "o" * 300, ["wide.png"]), "longer than text.max_len", "needs "),
    ]
    good = row(f"<image>{ASK}", ["wide.png"])
    data = image_data(shots, qwen, [good, *(made for made, _, _ in bad), good])
    data.close()

    ledger = data.ledger()
    assert (ledger["seen"], ledger["used"]) == (len(bad) + 2, 2)
    listed = {
        int(place.partition("rows.jsonl:")[2].partition(" ")[0]): (reason, place)
        for reason, entry in ledger["skipped"].items()
        for place in entry["rows"]
    }
    for line, (_, reason, detail) in enumerate(bad, start=2):
        assert reason in listed[line][0], line
        assert detail in listed[line][1], line


@pytest.mark.parametrize("policy", ["cut_prompt", "cut_tail"])
def test_rows_with_images_are_never_cut(policy: str, shots: Path, qwen: Path):
    image = row("<image>" + "why " * 200, ["wide.png"])
    texts = [row("why " * 200, answer="yes"), row("Hi", answer="yes " * 200)]
    data = image_data(shots, qwen, [image, *texts], too_long=policy, max_len=96)
    data.close()
    ledger = data.ledger()
    (entry,) = (
        entry for reason, entry in ledger["skipped"].items() if "rows with images are not cut" in reason
    )
    assert "rows.jsonl:1 " in entry["rows"][0]
    assert ledger["truncated"] == 1
    assert len(data.cache.images.documents) == 0


def test_a_model_without_a_processor_is_told_before_any_model_is_loaded(shots: Path, qwen: Path):
    plain = shots / "plain"
    plain.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (plain / name).write_bytes((qwen / name).read_bytes())
    with pytest.raises(
        DataError, match=r"rows.jsonl:2: the rows have images, but .* brings no processor"
    ) as error:
        image_data(shots, plain, [row("Hi"), row("<image>Hi", ["wide.png"])])
    assert "text.columns: {images: ''}" in str(error.value)
    data = image_data(shots, plain, [row("<image>Hi", ["wide.png"])], columns={"images": ""})
    assert "<image>Hi" in data.tokenizer.show(batches(data, 1)[0].input_ids[0].tolist())


def test_a_template_without_images_is_told(shots: Path, qwen: Path):
    with pytest.raises(DataError, match=r"the chat template chatml has no place for them: set text.template"):
        image_data(shots, qwen, [row("<image>Hi", ["wide.png"])], template="chatml")


def test_without_pillow_the_command_is_named(shots: Path, qwen: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(DataError, match=r"pip install 'trainforge-plugins\[images\]'"):
        image_data(shots, qwen, [row("<image>Hi", ["wide.png"])])


def test_modes_and_orientation(shots: Path, llava: Path):
    base = Image.open(shots / "wide.png")
    base.convert("L").save(shots / "grey.png")
    base.convert("P").save(shots / "palette.png")
    base.convert("RGBA").save(shots / "alpha.png")
    base.convert("CMYK").save(shots / "print.jpg")
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was turned by a quarter
    raw = io.BytesIO()
    base.save(raw, "JPEG", exif=turned)
    (shots / "turned.jpg").write_bytes(raw.getvalue())
    names = ["grey.png", "palette.png", "alpha.png", "print.jpg", "turned.jpg"]
    data = image_data(shots, llava, [row(f"<image>{ASK}", [name]) for name in names], micro=5)
    (batch,) = batches(data, 1)
    assert batch.inputs["pixel_values"].shape == (5, 3, 32, 32)
    sizes = [(file.width, file.height) for i in range(5) for file in data.cache.images.of(i)]
    assert sizes == [(80, 60)] * 4 + [(60, 80)]
