"""Questions read from files: LongBench's and RULER's, and files that are something else."""

import json

import pytest

from quest_jax.evals.metrics import score
from quest_jax.evals.tasks import jsonl, longbench, ruler_files
from quest_jax.evals.tasks.registry import TASKS, find
from quest_jax.evals.tasks.sizes import n_tokens_of
from tests.evals.fake_tokenizers import PairTokenizer

LONGBENCH = {
    "qasper": (128, "f1"), "narrativeqa": (128, "f1"), "hotpotqa": (32, "f1"), "multifieldqa_en": (64, "f1"),
    "gov_report": (512, "rouge_l"), "triviaqa": (32, "f1_first_line"),
}  # fmt: skip
RULER = {"ruler_niah": (128, "all_of"), "ruler_vt": (30, "all_of"), "ruler_cwe": (120, "all_of"),
         "ruler_fwe": (50, "all_of"), "ruler_qa": (32, "any_of")}  # fmt: skip
LINE = {"context": "A long text. " * 300, "input": "Who {is} it?", "answers": ["Ada", "Ada L."], "length": 900}
PROMPT = {"input": "Filler. " * 100 + "\nWhat is it?", "outputs": ["17"], "answer_prefix": " It is"}


def write(path, *lines):
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return path


def longbench_samples(folder, name="qasper", n_tokens=8000, n_cases=1, seed=0, lines=(LINE,)):
    write(folder / f"{name}.jsonl", *lines)
    return find(f"longbench_{name}").make(PairTokenizer(), n_tokens, n_cases, seed, path=folder)


@pytest.mark.parametrize("name", LONGBENCH)
def test_a_line_of_longbench_is_a_prompt_with_its_question_apart(tmp_path, name):
    sample = longbench_samples(tmp_path, name)[0]
    prompt = sample.context + sample.question
    assert prompt.count(LINE["context"]) == 1
    assert prompt.count(LINE["input"]) == (name != "gov_report")
    assert prompt.index(LINE["context"]) > 40  # the instruction comes first
    assert sample.answers == ("Ada", "Ada L.")
    assert (sample.n_new, sample.metric) == LONGBENCH[name]
    assert prompt.endswith({"gov_report": "Summary:", "triviaqa": LINE["input"]}.get(name, "Answer:"))
    assert 1 <= len(sample.question) <= 100
    assert score(sample.metric, "Ada", sample.answers) == 1


@pytest.mark.parametrize(("name", "begins", "long"), [
    ("qasper", "Question: Who", False), ("hotpotqa", "Question: Who", False), ("gov_report", "Now, ", False),
    ("multifieldqa_en", "ow, answer", None), ("narrativeqa", "Do not provide", False), ("qasper", "x" * 91, True),
])  # fmt: skip
def test_quest_decodes_what_follows_the_mark_but_no_more_than_100_characters(tmp_path, name, begins, long):
    line = LINE | {"input": "x" * 200} if long else LINE
    sample = longbench_samples(tmp_path, name, lines=[line])[0]
    if long is None:  # the mark lies further back
        assert len(sample.question) == 100 and "Now," in sample.context + sample.question
    else:
        assert sample.question.startswith(begins)
        assert (len(sample.question) == 100) == long


@pytest.mark.parametrize("name", LONGBENCH)
@pytest.mark.parametrize("letter", ["a", "\u00e9", "\u4e2d"])
def test_a_long_text_loses_its_middle(tmp_path, name, letter):
    text = "".join(f"{i} {letter * 7} " for i in range(3000))
    whole = longbench_samples(tmp_path, name, 10**6, lines=[LINE | {"context": text}])[0]
    for n_tokens in (1600, 3001):
        sample = longbench_samples(tmp_path, name, n_tokens, lines=[LINE | {"context": text}])[0]
        assert n_tokens - 8 <= n_tokens_of(PairTokenizer(), [sample]) <= n_tokens
        cut, prompt = sample.context + sample.question, whole.context + whole.question
        assert "\ufffd" not in cut
        first = next(i for i, (one, other) in enumerate(zip(cut, prompt, strict=False)) if one != other)
        assert prompt.endswith(cut[first:]) and prompt.startswith(cut[:first])
        assert len(cut[:first].encode()) == pytest.approx(len(cut[first:].encode()), abs=40)
        assert sample.question == whole.question


def test_a_prompt_that_just_fits_is_left_whole(tmp_path):
    whole = longbench_samples(tmp_path)[0]
    exact = n_tokens_of(PairTokenizer(), [whole])
    assert longbench_samples(tmp_path, n_tokens=exact) == [whole]
    less = longbench_samples(tmp_path, n_tokens=exact - 1)[0]
    assert less != whole and n_tokens_of(PairTokenizer(), [less]) <= exact - 1
    with pytest.raises(ValueError, match="got 140, which leaves nothing beside the question and 128 tokens"):
        longbench_samples(tmp_path, n_tokens=140)


def test_the_seed_draws_lines_of_the_file_in_their_order(tmp_path):
    lines = [LINE | {"answers": [str(i)]} for i in range(50)]
    first, again, other = (longbench_samples(tmp_path, n_cases=10, seed=seed, lines=lines) for seed in (0, 0, 1))
    assert first == again != other
    drawn = [int(sample.answers[0]) for sample in first]
    assert drawn == sorted(set(drawn)) and len(drawn) == 10
    assert len(longbench_samples(tmp_path, n_cases=50, lines=lines)) == 50
    assert len(longbench_samples(tmp_path, n_cases=51, lines=lines)) == 50


def test_blank_lines_and_unknown_fields_are_passed_over(tmp_path):
    path = write(tmp_path / "qasper.jsonl", LINE | {"all_classes": None, "dataset": "qasper"}, LINE)
    path.write_text("\n" + path.read_text() + "\n \n")
    assert len(find("longbench_qasper").make(PairTokenizer(), 8000, 2, path=str(tmp_path))) == 2


@pytest.mark.parametrize("name", RULER)
def test_a_line_of_ruler_is_a_prompt_whose_end_is_decoded(tmp_path, name):
    path = write(tmp_path / "validation.jsonl", PROMPT)
    sample = find(name).make(PairTokenizer(), 1000, 1, path=path)[0]
    assert sample.context + sample.question == PROMPT["input"] + PROMPT["answer_prefix"]
    assert sample.question.startswith(" Filler.") and 390 < len(sample.question) <= 400
    assert (sample.n_new, sample.metric) == RULER[name]
    assert score(sample.metric, " 17.", sample.answers) == 1
    without = {key: value for key, value in PROMPT.items() if key != "answer_prefix"}
    assert find(name).make(PairTokenizer(), 1000, 1, path=write(path, without))[0].question.endswith("What is it?")
    longest = n_tokens_of(PairTokenizer(), [sample])
    write(path, PROMPT)
    assert find(name).make(PairTokenizer(), longest, 1, path=path) == [sample]
    with pytest.raises(ValueError, match=f"has prompts of {longest} tokens with their answers, got {longest - 1}"):
        find(name).make(PairTokenizer(), longest - 1, 1, path=path)


def test_the_cut_is_at_white_space_where_there_is_some():
    assert ruler_files.split("a" * 500 + " " + "b" * 100) == ("a" * 500, " " + "b" * 100)
    assert ruler_files.split("a" * 500) == ("a" * 100, "a" * 400)
    assert ruler_files.split("a" * 100 + "\n" + "b" * 399) == ("a" * 100, "\n" + "b" * 399)


GOOD = json.dumps(LINE)
HOSTILE = {
    "no JSON": ("{", "expected valid JSON"),
    "a list": ("[1]", "expected a JSON object at the top level, got list"),
    "not a number": (GOOD.replace("900", "NaN"), "NaN, which is not JSON"),
    "infinity": (GOOD.replace("900", "1e999"), "beyond float64"),
    "a huge number": (GOOD.replace("900", "9" * 5000), "expected valid JSON"),
    "a large number": (GOOD.replace("900", "9" * 30), "length: expected an integer"),
    "a negative number": (GOOD.replace("900", "-1"), "length: expected an integer"),
    "nesting": ("[" * 100_000, "little nesting|expected valid JSON"),
    "deep nesting": (GOOD.replace("900", "[" * 80 + "]" * 80), "at most 64 levels"),
    "a key twice": (GOOD[:-1] + ', "input": "y"}', "the key 'input' twice"),
    "bytes": (b'{"context": "\xff"}', "expected valid JSON"),
    "a lone surrogate": (GOOD.replace("A long", "\\ud800", 1), "context: expected text that has a UTF-8 form"),
    "a surrogate in an answer": (GOOD.replace("Ada L", "\\udfff"), "answers: expected text that has a UTF-8 form"),
    "no context": (json.dumps({"input": "x", "answers": ["y"]}), "the key 'context' is missing"),
    "null": (json.dumps(LINE | {"context": None}), "the key 'context' is missing"),
    "a number as text": (json.dumps(LINE | {"input": 3}), "input: expected a string, got 3"),
    "a string of answers": (json.dumps(LINE | {"answers": "Ada"}), "answers: expected a list"),
    "numbers as answers": (json.dumps(LINE | {"answers": [1]}), "answers: expected a list of strings"),
    "no answers": (json.dumps(LINE | {"answers": []}), "answers: expected a list of strings that are not all blank"),
    "blank answers": (json.dumps(LINE | {"answers": [" ", ""]}), "not all blank"),
}  # fmt: skip


@pytest.mark.parametrize("line", HOSTILE)
def test_a_line_of_another_kind_is_refused_by_file_and_number(tmp_path, line):
    content, says = HOSTILE[line]
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "qasper.jsonl").write_bytes(f"{GOOD}\n\n".encode() + data + b"\n")
    with pytest.raises(ValueError, match=f"qasper.jsonl, line 3: .*({says})"):
        find("longbench_qasper").make(PairTokenizer(), 8000, 1, path=tmp_path)


@pytest.mark.parametrize(("change", "says"), [
    ({"outputs": ["17", ""]}, "outputs: expected strings that are not blank"),
    ({"outputs": None}, "outputs: expected a list of strings"),
    ({"outputs": [["17"]]}, "outputs: expected a list of strings"),
    ({"answer_prefix": 3}, "answer_prefix: expected a string"),
    ({"answer_prefix": "\ud800"}, "answer_prefix: expected text that has a UTF-8 form"),
    ({"input": "short"}, "input: expected more than the question's 400 characters"),
    ({"input": None}, "the key 'input' is missing"),
])  # fmt: skip
def test_a_line_that_is_not_of_ruler_is_refused(tmp_path, change, says):
    path = write(tmp_path / "x.jsonl", PROMPT, PROMPT | change)
    with pytest.raises(ValueError, match=f"x.jsonl, line 2: {says}"):
        find("ruler_niah").make(PairTokenizer(), 1000, 1, path=path)


def test_what_is_not_there_is_refused(tmp_path, monkeypatch):
    qasper, niah = find("longbench_qasper"), find("ruler_niah")
    with pytest.raises(ValueError, match="expected a directory with qasper.jsonl in it, got none"):
        qasper.make(PairTokenizer(), 8000, 1, path=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="qasper.jsonl: expected a file with one JSON object a line, got no such file"):
        qasper.make(PairTokenizer(), 8000, 1, path=tmp_path)
    with pytest.raises(ValueError, match="expected a file with one JSON object a line, got a directory"):
        niah.make(PairTokenizer(), 8000, 1, path=tmp_path)
    (tmp_path / "qasper.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match="expected at least one JSON object, got an empty file"):
        qasper.make(PairTokenizer(), 8000, 1, path=tmp_path)
    with pytest.raises(ValueError, match="n_tokens: expected 1 to"):
        qasper.make(PairTokenizer(), 0, 1, path=tmp_path)
    for name, task in TASKS.items():
        if task.reads:
            with pytest.raises(ValueError, match=f"task {name}: expected the path of a .*, got None"):
                task.make(PairTokenizer(), 8000, 1)
    monkeypatch.setattr(jsonl, "MAX_JSON_BYTES", 1000)
    write(tmp_path / "qasper.jsonl", LINE)
    with pytest.raises(ValueError, match="line 1: expected at most 1000 bytes, got more"):
        qasper.make(PairTokenizer(), 8000, 1, path=tmp_path)


def test_every_file_quest_reports_on_is_a_task():
    assert [data.name for data in longbench.DATA] == list(LONGBENCH)
