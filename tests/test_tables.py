import pytest

from quest_jax.tables import markdown_table, write_place


def test_a_table_in_markdown():
    assert markdown_table(["a", "b"], [("1", "2"), ("3", "4")]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |\n| 3 | 4 |"
    assert "| ---: | --- |" in markdown_table(["a", "b"], [], left=(1,))


def test_what_stands_around_a_place_stays(tmp_path):
    file = tmp_path / "x.md"
    write_place(file, "<b>", "<e>", "one")
    assert file.read_text() == "<b>\n\none\n<e>\n"
    file.write_text("before\n" + file.read_text() + "after\n")
    write_place(file, "<b>", "<e>", "two")
    assert file.read_text() == "before\n<b>\n\ntwo\n<e>\nafter\n"
    with pytest.raises(ValueError, match="expected the lines <b> and <f> once each"):
        write_place(file, "<b>", "<f>", "three")
    with pytest.raises(ValueError, match="a folder that exists"):
        write_place(tmp_path / "no" / "x.md", "<b>", "<e>", "")
