"""``quest-jax bench`` at tiny sizes: complete rows, files that say the same, wrong options refused before work."""

import importlib.util
import json
import sys
import types

import pytest

from quest_jax import cli
from quest_jax.bench import baselines, decode, llama_cpp, machine
from quest_jax.bench.rows import Row
from tests.tiny_model import write_tiny_model


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs a bench with both files; returns its JSON, its Markdown and what it printed."""
    monkeypatch.setattr(machine, "_READ_BYTES", 16 << 20)

    def run(*arguments):
        files = tmp_path / "a.json", tmp_path / "a.md"
        code = cli.main(["bench", *map(str, arguments), "--json", str(files[0]), "--markdown", str(files[1])])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        report = json.loads(files[0].read_text())
        for row in report["rows"]:
            assert tuple(row) == Row._fields
            assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"] and row["cpu_ms"] > 0
            assert row["achieved"] == pytest.approx(row["ratio"] / row["byte_model"])
        assert report["machine"]["read_gb_s"] > 0
        return report, files[1].read_text(), captured.out

    return run


def test_decode_compares_every_installed_method(run, monkeypatch):
    monkeypatch.setattr(baselines, "has_torch", lambda: False)
    report, markdown, out = run("decode", "--lengths", 512, "--shapes", "smollm2", "--budget", 128, "--steps",
                                "--rounds", 2)  # fmt: skip
    rows = report["rows"]
    assert [row["method"] for row in rows] == [
        "split32", "grouped einsum", "paged dense", "Quest 128", "budget=128, the library's choice",
        "jax.nn.dot_product_attention",
    ]  # fmt: skip
    best = min(row["ms"] for row in rows if row["budget"] is None)
    assert all(row["ratio"] == pytest.approx(best / row["ms"]) for row in rows)
    # Metadata is 2D floats for every 16 tokens of 2D floats.
    assert rows[3]["byte_model"] == pytest.approx(1 / (1 / 16 + 1 / 4))
    assert rows[4]["byte_model"] == rows[3]["byte_model"]  # it chose to choose
    assert rows[0]["gb_s"] == pytest.approx(2 * 3 * 512 * 64 * 4 / rows[0]["ms"] / 1e6)
    assert report["command"] == (
        "quest-jax bench decode --lengths 512 --shapes smollm2 --budget 128 --steps --rounds 2"
    )  # fmt: skip
    for text in (markdown, out):
        assert "Left out: torch SDPA" in text and "quest-jax[bench]" in text and "transposes" in text
        assert all(row["method"] in text for row in rows)


def test_decode_takes_methods_by_name_and_another_dtype(run):
    report, markdown, _ = run("decode", "--lengths", 512, "--shapes", "mha", "--dtype", "bfloat16", "--budget", 512,
                              "--methods", "grouped", "quest", "--steps", "--rounds", 1)  # fmt: skip
    grouped, quest = report["rows"]
    assert (grouped["method"], quest["method"], quest["dtype"]) == ("grouped einsum", "Quest 512", "bfloat16")
    assert quest["byte_model"] == 1  # within the budget it reads what dense reads
    assert "<!-- bench decode bfloat16" in markdown and "torch" not in markdown


def test_what_does_not_fit_is_left_out_with_its_numbers(run, monkeypatch):
    def no_room(*_):
        raise MemoryError("decode attention: needs 9.00 GB of host memory, but 1.00 GB are available")

    monkeypatch.setattr(decode, "check_memory", no_room)
    report, markdown, out = run("decode", "--lengths", 512, "--shapes", "smollm2", "--methods", "split", "--steps",
                                "--rounds", 1)  # fmt: skip
    assert report["rows"] == []
    for text in (markdown, out):
        assert "Left out: decode attention: needs 9.00 GB of host memory" in " ".join(text.split())


def test_long_counts_blocks_instead_of_pages(run):
    report, markdown, _ = run("long", "--lengths", 4096, "--shapes", "smollm2", "--dtype", "float32", "--budget", 16,
                              "--rounds", 1)  # fmt: skip
    dense, quest, two_levels = report["rows"]
    assert [row["method"] for row in report["rows"]] == ["paged dense", "Quest 16", "Quest on two levels 16"]
    # A minimum and maximum weigh as much as a token: of 256 pages; of 16 blocks, and of the pages of two of them.
    assert dense["byte_model"] == 1 and quest["byte_model"] == pytest.approx(4096 / (256 + 16))
    assert two_levels["byte_model"] == pytest.approx(4096 / (16 + 2 * 16 + 16))
    assert "<!-- bench long float32" in markdown


def test_ops_names_every_op(run):
    report, _, _ = run("ops", "--lengths", 512, "--shapes", "smollm2", "--budget", 128, "--rounds", 2)
    rows = {row["method"]: row for row in report["rows"]}
    assert list(rows) == ["append", "page_scores", "select", "copy of the listed pages", "page_attention, listed",
                          "page_attention, dense", "all, Quest", "all, dense"]  # fmt: skip
    assert rows["all, dense"]["ratio"] == 1
    models = {name: row["byte_model"] for name, row in rows.items()}
    assert models["page_scores"] == 16 and models["page_attention, listed"] == 4
    assert models["all, Quest"] == pytest.approx(1 / (1 / 16 + 1 / 4))


@pytest.mark.slow
def test_generate_times_tokens_and_the_first_one(run, tmp_path):
    model = str(write_tiny_model(tmp_path / "tiny"))
    report, _, out = run("generate", "--model", model, "--lengths", 256, "--budget", 64, "--prefill-budget", 64,
                         "--rounds", 1)  # fmt: skip
    shapes = [(row["shape"].removeprefix(model), row["method"]) for row in report["rows"]]
    assert shapes == [(" token", "dense"), (" token", "Quest 64"), (" first token", "dense"),
                      (" first token", "QuoKA 64")]  # fmt: skip
    assert report["rows"][0]["gb_s"] > 0 and report["rows"][2]["gb_s"] is None
    assert "llama.cpp" not in out  # no GGUF file


@pytest.mark.slow
def test_breakdown_and_calibrate_print_tables(monkeypatch, capsys):
    from quest_jax import LlamaConfig
    from quest_jax.bench import breakdown

    monkeypatch.setattr(breakdown, "SMOLLM2", LlamaConfig(64, 32, 64, 4, 4, 2, 8, 512))
    assert cli.main(["bench", "breakdown", "--length", "128", "--budget", "64", "--rounds", "1"]) == 0
    assert "choosing pages" in capsys.readouterr().out
    sizes = ["--lengths", "512", "1024", "--budgets", "64", "--rounds", "1"]
    assert cli.main(["bench", "calibrate", *sizes]) == 0
    assert "CostModel(stream=" in capsys.readouterr().out
    for wrong in (
        ["calibrate", "--lengths", "512"],
        ["calibrate", "--budgets", "65536"],
        ["breakdown", "--length", "9"],
    ):
        assert cli.main(["bench", *wrong]) == 2
        assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("decode", "--lengths", "500"), "--lengths: expected multiples of 512, got 500."),
        (("decode", "--steps", "100"), "--steps: expected multiples of 512, got 100."),
        (("decode", "--budget", "8"), "--budget: expected at least 16, got 8."),
        (("long", "--lengths", "100"), "--lengths: expected multiples of 512, got 100."),
        (("decode", "--rounds", "0"), "--rounds: expected at least 1, got 0."),
        (("decode", "--methods", "quest"), "--methods: expected a dense method"),
        (("decode", "--methods", "torch"), 'needs PyTorch; pip install "quest-jax[bench]"'),
        (("decode", "--json", "/no/such/folder/a.json"), "--json: expected a file in a folder that exists"),
        (("decode", "--markdown", "/no/such/folder/a.md"), "expected a file in a folder that exists"),
        (("decode", "--plot", "a.pdf"), "--plot: expected a .png file"),
        (("decode", "--plot", "a.png"), '--plot needs matplotlib; pip install "quest-jax[plot]"'),
        (("ops", "--lengths", "4096", "--plot", "a.png"), "--plot: expected two lengths or more"),
        (("ops", "--lengths", "2048"), "--lengths: expected more than the budget of 2048, got 2048."),
        (("generate", "--lengths", "100"), "--lengths: expected multiples of 128, got 100."),
        (("generate", "--llama-cpp", "True"), '--llama-cpp needs xllamacpp; pip install "quest-jax[bench]"'),
    ],
)
def test_wrong_options_are_refused_before_anything_is_timed(arguments, says, capsys, monkeypatch):
    find = importlib.util.find_spec
    # matplotlib is missing only where its absence is to be named; what is there is not imported before the checks end.
    missing = ("torch", "xllamacpp") + (("matplotlib",) if "matplotlib" in says else ())
    found = lambda name: None if name in missing else find("json" if name == "matplotlib" else name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", found)
    assert cli.main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.out == "" and captured.err.count("\n") == 1


def fake_llama_cpp(monkeypatch, timings):
    """A module like xllamacpp that answers with ``timings``; returns the requests it gets."""
    requests = []

    class Server:
        def __init__(self, options):
            self.options = options

        def handle_completions(self, request):
            requests.append(request)
            return {"timings": timings(request)} if timings else {"error": "no room"}

    names = ("model", "cpuparams", "cpuparams_batch")
    options = lambda: types.SimpleNamespace(**{name: types.SimpleNamespace() for name in names})  # noqa: E731
    module = types.ModuleType("xllamacpp")
    module.__dict__.update(CommonParams=options, Server=Server, __spec__=types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "xllamacpp", module)
    return requests


def test_llama_cpp_is_believed_only_where_it_kept_the_prompt(monkeypatch, tmp_path):
    requests = fake_llama_cpp(monkeypatch, lambda r: {"prompt_n": 1, "predicted_n": r["n_predict"]})
    assert llama_cpp.LlamaCpp(tmp_path / "m.gguf", [1, 2, 3], 8).decode(8) == 8
    assert requests[0]["prompt"] == [1, 2, 3] and requests[0]["ignore_eos"]
    fake_llama_cpp(monkeypatch, lambda r: {"prompt_n": 3, "predicted_n": 8})
    with pytest.raises(RuntimeError, match="after 3 tokens read again"):
        llama_cpp.LlamaCpp(tmp_path / "m.gguf", [1, 2, 3], 8).decode(8)
    fake_llama_cpp(monkeypatch, lambda r: {"prompt_n": 1, "predicted_n": 2})
    with pytest.raises(RuntimeError, match="expected 8 new tokens"):
        llama_cpp.LlamaCpp(tmp_path / "m.gguf", [1, 2, 3], 8).decode(8)
    fake_llama_cpp(monkeypatch, None)
    with pytest.raises(RuntimeError, match="no room"):
        llama_cpp.LlamaCpp(tmp_path / "m.gguf", [1, 2, 3], 8).read_prompt()
