"""Conversations that are longer than a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.text.chats import CHAT, character_tokenizer

from trainforge_plugins.text.chat import choose_template
from trainforge_plugins.text.conversation import BadRow, Conversation, Message
from trainforge_plugins.text.labels import Encoded, Labeller
from trainforge_plugins.text.policy import DoesNotFit, Fitted, TooLong, fit, levelled

TOKENIZER = character_tokenizer()
LABELLER = Labeller(choose_template("chatml", TOKENIZER), TOKENIZER, "assistant")


def chat(*turns: str) -> Encoded:
    roles = ("user", "assistant")
    messages = tuple(Message(roles[i % 2], text) for i, text in enumerate(turns))
    return LABELLER.encode(Conversation(messages))


def text(fitted: Fitted) -> str:
    return TOKENIZER.show(fitted.ids.tolist())


def learnt(fitted: Fitted) -> str:
    return TOKENIZER.show(fitted.ids[fitted.supervised].tolist())


FRAME = len(chat("x", "y").ids) - 2  # the template's own tokens


@pytest.mark.parametrize("too_long", ["drop", "cut_prompt", "cut_tail"])
def test_what_fits_is_left_as_it_is(too_long: TooLong):
    encoded = chat("question", "answer")
    fitted = fit(encoded, len(encoded.ids), too_long)
    assert np.array_equal(fitted.ids, encoded.ids)
    assert not fitted.truncated


def test_drop_says_what_would_be_enough():
    encoded = chat("question", "answer")
    with pytest.raises(DoesNotFit, match=r"longer than text.max_len \(needs \d+ tokens\)") as caught:
        fit(encoded, len(encoded.ids) - 1, "drop")
    assert caught.value.needed == len(encoded.ids)


def test_a_prompt_loses_its_middle_and_nothing_else():
    fitted = fit(chat("0123456789", "answer"), FRAME + 6 + 5, "cut_prompt")
    assert text(fitted) == ("<|im_start|>user\n01289<|im_end|>\n<|im_start|>assistant\nanswer<|im_end|>\n")
    assert learnt(fitted) == "answer<|im_end|>"
    assert fitted.truncated


def test_what_comes_behind_a_gap_is_not_learnt_with_everything():
    labeller = Labeller(choose_template("chatml", TOKENIZER), TOKENIZER, "all")
    chatted = Conversation((Message("user", "0123456789"), Message("assistant", "answer")))
    fitted = fit(labeller.encode(chatted), FRAME + 6 + 5, "cut_prompt")
    assert text(fitted) == ("<|im_start|>user\n01289<|im_end|>\n<|im_start|>assistant\nanswer<|im_end|>\n")
    assert learnt(fitted) == text(fitted).replace("01289", "0129")


def test_the_longest_prompts_are_cut_first():
    encoded = chat("0123456789", "one", "abcd", "two")
    fitted = fit(encoded, len(encoded.ids) - 4, "cut_prompt")
    assert "user\n012789<|im_end|>" in text(fitted)
    assert "user\nabcd<|im_end|>" in text(fitted)
    fitted = fit(encoded, len(encoded.ids) - 9, "cut_prompt")
    assert "user\n09<|im_end|>" in text(fitted)
    assert "user\nabd<|im_end|>" in text(fitted)


def test_a_long_answer_cannot_be_saved_by_cutting_prompts():
    encoded = chat("0123456789", "a" * 50)
    with pytest.raises(DoesNotFit) as caught:
        fit(encoded, 40, "cut_prompt")
    assert caught.value.needed == FRAME + 1 + 50
    assert text(fit(encoded, caught.value.needed, "cut_prompt")).count("a" * 50) == 1


def test_a_cut_answer_keeps_its_end_token_without_a_label():
    encoded = chat("question", "0123456789")
    fitted = fit(encoded, FRAME - 1 + 8 + 5, "cut_tail")
    assert text(fitted).endswith("assistant\n01234<|im_end|>")
    assert learnt(fitted) == "01234"
    assert fitted.truncated


def test_later_turns_that_do_not_fit_are_left_off_whole():
    encoded = chat("question", "answer", "another one", "another answer")
    whole = len(chat("question", "answer").ids)
    for length in (whole - 1, whole, whole + 10):
        fitted = fit(encoded, length, "cut_tail")
        assert text(fitted).endswith("answer<|im_end|>")
        assert learnt(fitted) == "answer<|im_end|>"


def test_a_prompt_that_fills_the_row_leaves_nothing_to_cut():
    encoded = chat("a long question", "answer")
    with pytest.raises(DoesNotFit, match="no token to learn from") as caught:
        fit(encoded, 10, "cut_tail")
    needed = caught.value.needed
    assert learnt(fit(encoded, needed, "cut_tail")) == "a"
    with pytest.raises(DoesNotFit):
        fit(encoded, needed - 1, "cut_tail")


def test_nothing_to_learn_at_any_length():
    silent = Conversation((Message("user", "q"), Message("assistant", "a", trained=False)))
    with pytest.raises(BadRow, match="no token to learn from") as caught:
        fit(LABELLER.encode(silent), 1000, "drop")
    assert not isinstance(caught.value, DoesNotFit)


def length_needed(encoded: Encoded, length: int, too_long: TooLong) -> int | None:
    try:
        fit(encoded, length, too_long)
    except DoesNotFit as error:
        return error.needed
    return None


@given(st.integers(2, 200), st.sampled_from(["cut_prompt", "cut_tail"]))
def test_whatever_is_cut_fits_and_learns_something(length: int, too_long: TooLong):
    encoded = LABELLER.encode(CHAT)
    needed = length_needed(encoded, length, too_long)
    assert needed is None or needed > length
    fitted = fit(encoded, length if needed is None else needed, too_long)
    if needed is not None:
        assert fitted.supervised[1:].any()
        return
    assert len(fitted.ids) <= length
    assert fitted.supervised[1:].any()
    assert fitted.truncated == (length < len(encoded.ids))
    shown = text(fitted)
    assert shown.count("<|im_start|>") == shown.count("<|im_end|>")  # template tokens come whole
    if too_long == "cut_prompt":
        assert learnt(fitted) == "Hello.<|im_end|>4<|im_end|>user<|im_end|>"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 100))
def test_levelling_takes_from_the_longest(lengths: list[int], total: int):
    assume(total <= sum(lengths))
    level = levelled(lengths, total)
    assert sum(level) == total
    cut = [after for before, after in zip(lengths, level, strict=True) if after < before]
    whole = [after for before, after in zip(lengths, level, strict=True) if after == before]
    assert not cut or max(cut) - min(cut) <= 1
    assert not cut or not whole or max(whole) <= max(cut) + 1
