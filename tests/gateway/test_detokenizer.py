from __future__ import annotations

from hypothesis import given, strategies as st

from tests.gateway.conftest import EOS
from whalepod.server.tokenizer import TextTokenizer

TEXTS = st.text(alphabet="aé上海🙂👨‍👩‍👧ß\n ▁｜", max_size=40)


@given(text=TEXTS)
def test_pieces_add_up_to_the_full_text_and_never_hold_half_a_character(
    tokenizer: TextTokenizer, text: str
) -> None:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(i) for i in tokenizer.encode(text, adds_bos=False)]

    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.flush() == ""


@given(text=TEXTS, data=st.data())
def test_a_cut_answer_equals_the_full_decode_of_its_tokens(
    tokenizer: TextTokenizer, text: str, data: st.DataObject
) -> None:
    ids = tokenizer.encode(text, adds_bos=False)
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(i) for i in ids]

    whole = tokenizer.transformers.decode(ids, clean_up_tokenization_spaces=False)
    assert "".join(pieces) + detokenizer.flush() == whole
    assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 350), max_size=30))
def test_any_tokens_decode_as_the_reference_does(tokenizer: TextTokenizer, ids: list[int]) -> None:
    ids = [i for i in ids if i < len(tokenizer.token_bytes)]

    assert tokenizer.decode(ids) == tokenizer.transformers.decode(
        ids, clean_up_tokenization_spaces=False
    )


def test_special_tokens_are_skipped_unless_asked_for(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode(f"a{EOS}b", adds_bos=False)

    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    assert tokenizer.decode(ids) == f"a{EOS}b"


def test_an_id_beyond_the_tokenizer_has_no_text(tokenizer: TextTokenizer) -> None:
    # checkpoints pad their vocabulary: the model may emit an id that has no token
    assert tokenizer.decode([len(tokenizer.token_bytes) + 5]) == ""
