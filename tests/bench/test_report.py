"""Reports: Markdown that leaves prose alone, JSON that compare reads, what moved between two of them."""

import json
import re

import pytest

from quest_jax import cli
from quest_jax.bench import compare, report
from quest_jax.bench.rows import Row, Section
from tests.imports import ROOT

MACHINE = {"jax": "0.12", "device": "cpu", "platform": "cpu", "processor": "a CPU", "cores": 2, "system": "Linux",
           "read_gb_s": 20.0}  # fmt: skip


def row(method="split32", length=512, ms=2.0, ratio=1.0, budget=None, **changes) -> Row:
    fields = dict(
        shape="smollm2", length=length, dtype="float32", method=method, budget=budget, ms=ms, ms_low=0.9 * ms,
        ms_high=1.1 * ms, cpu_ms=ms, compile_s=0.5, ratio=ratio, byte_model=1.0, achieved=ratio, gb_s=5.0,
    )  # fmt: skip
    return Row(**(fields | changes))


def make(*rows: Row, key="decode float32") -> report.Report:
    return report.Report("quest-jax bench decode", key, MACHINE, 15, [Section("attention", rows, "A note.")])


def test_markdown_is_a_table_under_command_and_machine(tmp_path):
    file = tmp_path / "new.md"
    report.write_markdown(file, make(row(), row("Quest 64", ms=0.5, ratio=4.0, budget=64)))
    lines = file.read_text().splitlines()
    assert "`quest-jax bench decode`" in lines
    assert any("reads 20.0 GB/s from memory; medians of 15 interleaved runs" in line for line in lines)
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4 and len({line.count("|") for line in table}) == 1
    assert "| smollm2 | 512 | Quest 64 | 0.50 ms (0.45-0.55) | 0.50 ms | 0.5 s | 5.0 GB/s, 25% | 4.00x |" in table[3]
    assert "A note." in lines


def test_prose_around_the_markers_stays(tmp_path):
    file = tmp_path / "performance.md"
    begin, end = report.markers("decode float32")
    file.write_text(f"# Title\n\nBefore.\n\n{begin}\nold table\n{end}\n\nAfter.\n")
    for _ in range(2):  # a second time it finds its own markers
        report.write_markdown(file, make(row()))
        text = file.read_text()
        assert text.startswith("# Title\n\nBefore.\n\n") and text.endswith(f"{end}\n\nAfter.\n")
        assert "old table" not in text and text.count("| smollm2 |") == 1


@pytest.mark.parametrize("content", ["prose alone", "{begin}", "{end}\n{begin}", "{begin}\n{end}\n{begin}\n{end}"])
def test_a_file_without_its_place_is_refused_and_kept(tmp_path, content):
    begin, end = report.markers("decode float32")
    file = tmp_path / "performance.md"
    file.write_text(content.format(begin=begin, end=end))
    with pytest.raises(ValueError, match="bench decode float32"):
        report.write_markdown(file, make(row()))
    assert file.read_text() == content.format(begin=begin, end=end)


@pytest.mark.parametrize(("ms", "says"), [(0.1234, "0.12"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"),
                                          (9999.0, "9999"), (12340.0, "12.3")])  # fmt: skip
def test_three_digits(ms, says):
    assert report._number(ms) == says


def test_compare_shows_what_moved_and_what_is_only_in_one(tmp_path, capsys):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    quest = dict(method="Quest 64", budget=64)
    report.write_json(before, make(row(), row(**quest, ms=1.0, ratio=2.0), row(length=1024)))
    report.write_json(after, make(row(ms=2.1), row(**quest, ms=0.5, ratio=4.2), row(dtype="bfloat16")))
    assert cli.main(["bench", "compare", str(before), str(after)]) == 0
    out = capsys.readouterr().out
    assert f"only in {before}: smollm2, 1024 tokens, float32, split32" in out
    assert f"only in {after}: smollm2, 512 tokens, bfloat16, split32" in out
    lines = [line for line in out.splitlines() if line.startswith("│")]
    assert len(lines) == 2
    assert "+5% ~" in lines[0]  # within the quartiles
    for text in ("1.00 ms", "0.50 ms", "-50% │", "2.00x", "4.20x", "+110%"):
        assert text in lines[1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[: len(text) // 2], "got no JSON"),
        (lambda _: "[1, 2]", 'found no "machine"'),
        (lambda _: '{"rows": []}', 'found no "machine"'),
        (lambda _: '{"machine": {}, "rows": []}', 'found no "machine" with jax'),
        (lambda _: json.dumps({"machine": MACHINE}), 'found no list "rows"'),
        (lambda text: text.replace('"ratio"', '"speedup"'), "in row 0 the keys"),
        (lambda text: text.replace('"ms": 2.0', '"ms": "fast"'), "in row 0 ms is 'fast'"),
        (lambda text: text.replace('"ms": 2.0', '"ms": 0'), "in row 0 ms is 0"),
        (lambda text: text.replace('"ratio": 1.0', '"ratio": NaN'), "in row 0 ratio is nan"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path, capsys, change, says):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    report.write_json(good, make(row()))
    bad.write_text(change(good.read_text()))
    for files in ((good, bad), (bad, good)):
        assert cli.main(["bench", "compare", *map(str, files)]) == 2
        said = capsys.readouterr().err
        assert f"{bad}: expected a report that quest-jax bench wrote with --json" in said and says in said


def test_a_missing_report_and_a_row_twice_are_refused(tmp_path, capsys):
    file = tmp_path / "a.json"
    report.write_json(file, make(row(), row()))
    assert cli.main(["bench", "compare", str(file), str(file)]) == 2
    assert "smollm2, 512 tokens, float32, split32 twice" in capsys.readouterr().err
    assert cli.main(["bench", "compare", str(tmp_path / "none.json"), str(file)]) == 2
    assert "none.json" in capsys.readouterr().err


def test_json_keeps_every_field(tmp_path):
    file = tmp_path / "a.json"
    rows = [row(compile_s=None, gb_s=None), row("Quest 64", budget=64)]
    report.write_json(file, make(*rows))
    assert list(compare.read_report(file).rows.values()) == rows
    assert json.loads(file.read_text())["machine"]["read_gb_s"] == 20.0


def test_the_document_has_a_place_for_every_bench_of_make_bench():
    calls = re.findall(r"\$\(call bench,(\w+),[\w-]+,(.*)\)", (ROOT / "Makefile").read_text())
    assert {name for name, _ in calls} == {"decode", "long", "prefill", "generate", "ops"}
    for name, options in calls:
        dtype = "bfloat16" if name == "long" or "--dtype bfloat16" in options else "float32"
        report.check_markdown(ROOT / "docs" / "performance.md", f"{name} {dtype}")
