"""The questions of every task: their length, and that whoever reads the text can answer them."""

import collections
import re

import pytest

from quest_jax.evals.metrics import score
from quest_jax.evals.needle import INSTRUCTION, shipped_text, split_sentences
from quest_jax.evals.tasks import facts, frequent_words, words
from quest_jax.evals.tasks.registry import TASKS, find
from quest_jax.evals.tasks.sizes import n_tokens_of
from tests.evals.fake_tokenizers import PairTokenizer, WordTokenizer

MADE = [name for name, task in TASKS.items() if task.reads is None]
NIAH = {"niah_single": 1, "niah_multikey": 1, "niah_multivalue": 4, "niah_multiquery": 4}


def passkey_oracle(sample):
    return re.findall(r"The pass key is (\d+)\. Remember", sample.context + sample.question)


def needle_oracle(sample):
    keys = re.findall(r"[a-z]+-[a-z]+", re.findall(r"for (.*?) mentioned", sample.question)[0])
    return [number for key in keys for number in re.findall(rf"magic numbers for {key} is: (\d+)\.", sample.context)]


def chain_oracle(sample):
    value = re.findall(r"assigned the value (\d+)", sample.question)[0]
    held = {}
    for name, origin in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", sample.context):
        held[name] = held.get(origin, origin)
    return [name for name, content in held.items() if content == value]


def common_oracle(sample):
    asked = sample.context.rsplit("often.\n", 1)[1]
    counts = collections.Counter(re.findall(r"\d+\. ([\w-]+)", asked)).most_common(11)
    assert counts[9][1] > counts[10][1]
    return [word for word, _ in counts[:10]]


def coded_oracle(sample):
    text = sample.context.split("coded words. ", 1)[1].split()
    counts = collections.Counter(word for word in text if word != "...").most_common(4)
    assert counts[2][1] > counts[3][1]
    return [word for word, _ in counts[:3]]


def fact_oracle(sample):
    begins = sample.question.rsplit("? ", 1)[1]
    return [re.findall(rf"{re.escape(begins)} ?(\w+)", sample.context)[0]]


ORACLES = {
    "passkey": passkey_oracle, **dict.fromkeys(NIAH, needle_oracle), "vt": chain_oracle, "cwe": common_oracle,
    "fwe": coded_oracle, "facts": fact_oracle,
}  # fmt: skip


def make(name, n_tokens=2048, n_cases=7, seed=0, tokenizer=None):
    return find(name).make(tokenizer or WordTokenizer(), n_tokens, n_cases, seed)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("tokenizer", [WordTokenizer(), PairTokenizer()])
def test_samples_come_near_the_length_asked_for_and_never_beyond(name, tokenizer):
    for n_tokens in (1600, 2048, 4500):
        samples = make(name, n_tokens, tokenizer=tokenizer)
        assert len(samples) == 7
        lengths = [n_tokens_of(tokenizer, [sample]) for sample in samples]
        assert max(lengths) <= n_tokens
        assert min(lengths) >= n_tokens - max(0.07 * n_tokens, 250)  # a sentence of Melville's


@pytest.mark.parametrize("name", MADE)
def test_whoever_reads_the_text_can_answer(name):
    for sample in make(name, n_cases=12):
        found = ORACLES[name](sample)
        assert sorted(found) == sorted(sample.answers)
        assert score(sample.metric, " " + ", ".join(found), sample.answers) == 1
        assert score(sample.metric, " I do not know.", sample.answers) == 0
        if name != "passkey":  # its question has the end of the filler, where the last key stands
            assert not any(answer in sample.question for answer in sample.answers)


@pytest.mark.parametrize("name", MADE)
def test_samples_depend_on_the_seed_alone(name):
    first, again, other = (make(name, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert not {sample.context for sample in first} & {sample.context for sample in other}


@pytest.mark.parametrize("name", MADE)
def test_lengths_out_of_range_are_refused_with_the_numbers(name):
    with pytest.raises(ValueError, match=r"n_tokens: expected at least \d+ .* got 40; ask for longer"):
        make(name, 40)
    with pytest.raises(ValueError, match="n_tokens: expected 1 to 16777216, got 100000000"):
        make(name, 10**8)
    with pytest.raises(ValueError, match="n_cases: expected at least 1, got 0"):
        make(name, n_cases=0)
    with pytest.raises(ValueError, match=f"task {name}: expected no path"):
        find(name).make(WordTokenizer(), 2048, 1, 0, path="x")
    shortest = int(re.findall(r"at least (\d+)", str(pytest.raises(ValueError, make, name, 40).value))[0])
    assert shortest - 2 <= n_tokens_of(WordTokenizer(), make(name, shortest, 1)) <= shortest  # others ask in more words
    with pytest.raises(ValueError, match=f"at least {shortest}"):
        make(name, shortest - 1, 1)


@pytest.mark.parametrize("name", MADE)
def test_a_hundred_cases_are_tokenised_two_or_three_times_each(name):
    tokenizer = WordTokenizer()
    samples = make(name, 4096, 100, tokenizer=tokenizer)
    text = sum(len(context) for context in {sample.context for sample in samples})
    assert tokenizer.seen < 4 * text


def test_an_unknown_task_is_refused_with_the_names():
    with pytest.raises(ValueError, match="expected one of passkey, facts, niah_single, .*ruler_qa, got 'niah'"):
        find("niah")
    assert all(name == task.name for name, task in TASKS.items())


@pytest.mark.parametrize("name", NIAH)
def test_needles_stand_once_in_the_haystack(name):
    depths = []
    for sample in make(name, n_cases=40):
        assert len(set(sample.answers)) == NIAH[name]
        assert all(re.fullmatch(r"\d{7}", answer) and sample.context.count(answer) == 1 for answer in sample.answers)
        if NIAH[name] == 1:
            lines = sample.context.split("\n")[1:]
            place = next(i for i, line in enumerate(lines) if sample.answers[0] in line)
            assert sample.depth == pytest.approx(place / (len(lines) - 1))
            depths.append(sample.depth)
        else:
            assert sample.depth is None
    if depths:
        assert min(depths) < 0.2 and max(depths) > 0.8


def test_needles_ask_in_the_words_of_ruler():
    single, several = make("niah_single")[0], make("niah_multiquery")[0]
    key = re.findall(r"for (\S+) is:", single.context)[0]
    asked = f"for {key} mentioned in the provided text"
    assert single.question == f"\nWhat is the special magic number {asked}? The special magic number {asked} is"
    assert single.context.startswith("A special magic number is hidden within the following text.")
    assert several.context.startswith("Some special magic numbers are hidden within the following text.")
    assert re.search(r"are all .* for \S+, \S+, \S+, and \S+ mentioned .*\? The special .* are$", several.question)
    assert len(set(re.findall(r"magic numbers for (\S+) is", several.context))) == 4
    assert len(set(re.findall(r"magic numbers for (\S+) is", make("niah_multivalue")[0].context))) == 1
    others = re.findall(r"magic numbers for (\S+) is", make("niah_multikey")[0].context)
    assert len(others) > 50


def test_prose_begins_again_where_it_ends():
    sample = make("niah_multivalue", 16_000, 1)[0]
    assert sample.context.count("CHAPTER 35. The Mast-Head.") == 2
    assert needle_oracle(sample) and len(needle_oracle(sample)) == 4


def test_a_chain_has_four_hops_in_order_after_a_solved_one():
    for sample in make("vt"):
        assert sample.n_new == 30
        example, asked = sample.context.split("\n\nMemorize")
        lines = [line for line in asked.split("\n") if line.startswith("VAR")]
        assert [line.split()[1] for line in lines] == list(sample.answers)
        assert lines[0].split()[-1] in sample.question
        assert [line.split()[-1] for line in lines[1:]] == list(sample.answers[:-1])
        solved = example.split("they are: ")[1].split()
        assert len(solved) == 5 and not set(solved) & set(sample.answers)


@pytest.mark.parametrize(("n_tokens", "often", "seldom"), [(2048, 6, 1), (4096, 30, 3), (9000, 30, 3)])
def test_common_words_are_as_frequent_as_in_ruler(n_tokens, often, seldom):
    for sample in make("cwe", n_tokens, 3):
        entries = re.findall(r"(\d+)\. ([\w-]+)", sample.context.rsplit("often.\n", 1)[1])
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        counts = collections.Counter(word for _, word in entries)
        assert {word for word, count in counts.items() if count == often} == set(sample.answers)
        assert set(counts.values()) == {often, seldom}
        assert len(sample.answers) == 10


def test_a_longer_list_than_the_prose_has_words_takes_pairs_too():
    sample = make("cwe", 40_000, 1)[0]
    assert n_tokens_of(WordTokenizer(), [sample]) > 39_000
    counts = collections.Counter(re.findall(r"\d+\. ([\w-]+)", sample.context.rsplit("often.\n", 1)[1]))
    assert any("-" in word for word in counts) and any("-" not in word for word in counts)
    assert {word for word, count in counts.items() if count == 30} == set(sample.answers)
    with pytest.raises(ValueError, match=r"text for \d+ tokens at most, got 1000000; ask for shorter"):
        make("cwe", 10**6, 1)


@pytest.mark.parametrize("n_words", [150, 151, 1000, 12345])
def test_counts_of_coded_words_fall_as_the_square_of_their_rank(n_words):
    counts = frequent_words.coded_counts(n_words)
    zeta = sum(k**-2.0 for k in range(1, 10**6))
    assert counts == [int(n_words * k**-2.0 / zeta) for k in range(1, len(counts) + 1)]
    assert int(n_words * (len(counts) + 1) ** -2.0 / zeta) == 0  # the next has none
    assert counts[1] > counts[2] > counts[3] > counts[4] >= 1


def test_coded_words_have_six_letters_and_the_first_is_dots():
    sample = make("fwe")[0]
    counts = collections.Counter(sample.context.split("coded words. ", 1)[1].split())
    assert counts.most_common(1)[0][0] == "..."
    assert [word for word, _ in counts.most_common(4)[1:]] == list(sample.answers)
    assert all(re.fullmatch(r"[a-z]{6}|\.\.\.", word) for word in counts)


def test_no_word_to_find_is_part_of_another():
    everything = [*words.prose_words(), *words.ADJECTIVES, *words.NOUNS]
    assert len(words.prose_words()) > 1000
    for word in words.prose_words():
        assert sum(word in other for other in everything) == 1, word
    pairs = "\n".join(words.pairs())
    assert len(words.pairs()) == len(set(words.pairs())) > 10_000
    for word in words.pairs()[::97]:
        assert pairs.count(word) == 1, word
    assert not any(a.endswith(b) for a in words.ADJECTIVES for b in words.ADJECTIVES if a != b)
    assert not any(a.startswith(b) for a in words.NOUNS for b in words.NOUNS if a != b)


def test_facts_share_their_context_and_stand_at_their_depths():
    samples = make("facts", 4096, 15)
    contexts = list(dict.fromkeys(sample.context for sample in samples))
    assert [sum(sample.context == context for sample in samples) for context in contexts] == [6, 6, 3]
    assert len({context.split("\n")[1][:40] for context in contexts}) == 3  # they begin elsewhere
    for sample in samples:
        answer = sample.answers[0]
        assert len(re.findall(rf"\b{answer}\b", sample.context)) == 2
        assert answer not in shipped_text() or answer.isdigit()
        instruction, body = sample.context.split("\n")
        assert instruction == INSTRUCTION
        before = body[: body.index(sample.question.rsplit("? ", 1)[1])]
        assert sample.depth == pytest.approx(len(split_sentences(before)) / len(split_sentences(body)), abs=0.06)
    assert sorted(sample.depth for sample in samples[:6]) == pytest.approx(
        [(2 * i + 1) / 12 for i in range(6)], abs=0.02
    )
    kinds = [{sample.question[:14] for sample in samples[i : i + 6]} for i in (0, 6)]
    assert [len(kind) for kind in kinds] == [6, 6]


def test_all_the_shipped_prose_makes_the_longest_context():
    text = shipped_text()
    longest = make("facts", 11_000, 6)
    assert n_tokens_of(WordTokenizer(), longest) > 10_900
    with pytest.raises(ValueError, match=r"text for (\d+) tokens at most, got 20000; ask for shorter"):
        make("facts", 20_000)
    for kind in facts.KINDS.values():
        assert len(set(kind.subjects)) == len(kind.subjects) and len(set(kind.answers)) == len(kind.answers)
        for answer in kind.answers:
            assert re.search(rf"\b{answer}\b", text, re.IGNORECASE) is None, answer
    told = [answer for kind in facts.KINDS.values() for answer in kind.answers]
    assert len(told) == len(set(told))


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_facts_can_be_told(count):
    samples = facts.generate(WordTokenizer(), 1000, 6, 0, facts=count)
    assert len({sample.context for sample in samples}) == 6 // count
    for number in (0, 7):
        with pytest.raises(ValueError, match=f"facts: expected 1 to 6 in a context, one of a kind, got {number}"):
            facts.generate(WordTokenizer(), 1000, 6, 0, facts=number)
