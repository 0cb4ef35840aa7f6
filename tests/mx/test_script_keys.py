"""Keys of scripts: numbers of their own in each store."""

import pytest

from lbbsp_mx.store.script_keys import FIRST_OWN_KEY, ScriptKeys, flat


def test_each_store_has_numbers_of_its_own():
    taken = set()
    first, second = ScriptKeys(taken), ScriptKeys(taken)
    first.introduce([3, 5])
    second.introduce([5, 4])
    assert first.numbers([3, 5]) == [3, 5]
    other, same = second.numbers([5, 4])
    assert same == 4
    assert other not in {3, 4, 5}
    assert second.indices == {other: 5, 4: 4}, "the optimizer sees the key of the script"


def test_texts_are_indexed_by_their_order():
    keys = ScriptKeys({0, 2})
    keys.introduce(["b", "a"])
    assert keys.numbers(["b", "a"]) == [1, 3]
    assert keys.indices == {1: 0, 3: 1}


def test_lists_keep_their_nesting():
    keys = ScriptKeys(set())
    keys.introduce([["a", "b"], ["c"]])
    assert keys.numbers([["a", "b"], ["c"]]) == [[0, 1], [2]]
    assert list(flat(("a", ["b"]))) == ["a", "b"]


def test_keys_that_are_new_are_known_by_name():
    keys = ScriptKeys(set())
    keys.introduce("a")
    assert keys.unknown("a") == []
    assert keys.unknown(["b", "c"]) == ["b", "c"]
    assert keys.unknown(["a", "b"]) == ["b"]


@pytest.mark.parametrize("key", [FIRST_OWN_KEY, -1, 1.5, None])
def test_other_keys_are_refused(key):
    with pytest.raises(TypeError, match=r"texts or integers in \[0, 100000\)"):
        ScriptKeys(set()).introduce(key)
