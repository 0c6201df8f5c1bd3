"""The ``quest-jax`` command, on a tiny random model."""

import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys

import pytest

import quest_jax
from quest_jax import cli, generate, load, load_tokenizer
from tests.imports import ROOT
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run(capsys):
    """Runs a command; returns exit code, stdout and stderr."""

    def run(*arguments) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Calls of ``enable_compilation_cache``: no test of the command line keeps programs in the user's home."""
    calls = []
    monkeypatch.setattr(quest_jax, "enable_compilation_cache", lambda: calls.append(1))
    return calls


def expected_text(model: str, prompt: str, **options) -> str:
    tokenizer = load_tokenizer(model)
    out = generate(load(model), [tokenizer.encode(prompt)], **options)
    return tokenizer.decode(out.tokens[0, : out.lengths[0]].tolist())


def test_generate_prints_the_continuation_and_numbers_apart(run, model):
    code, out, err = run("generate", "--model", model, "--prompt", "Call me", "--max-new-tokens", 12)
    assert code == 0
    assert out == expected_text(model, "Call me", max_new_tokens=12) + "\n"
    assert err.startswith("7 prompt tokens in ")
    assert "12 new tokens" in err and "ms per token" in err
    assert "\x1b" not in out + err  # no colours or bars where nobody watches


def test_the_prompt_may_come_from_a_file_or_a_pipe(run, model, tmp_path, monkeypatch):
    options = ("generate", "--model", model, "--max-new-tokens", 6)
    _, wanted, _ = run(*options, "--prompt", "naïve whale")
    (tmp_path / "prompt.txt").write_text("naïve whale", encoding="utf-8")
    assert run(*options, "--prompt-file", tmp_path / "prompt.txt")[1] == wanted
    monkeypatch.setattr(sys, "stdin", io.StringIO("naïve whale"))
    assert run(*options)[1] == wanted


@pytest.mark.slow
def test_options_reach_the_generation(run, model):
    options = ("generate", "--model", model, "--prompt", "a " * 100, "--max-new-tokens", 20)
    _, greedy, _ = run(*options)
    _, sparse, _ = run(*options, "--budget", 32, "--page-size", 8)
    assert sparse == expected_text(model, "a " * 100, max_new_tokens=20, budget=32, page_size=8) + "\n"
    sampled = [run(*options, "--temperature", 2.0, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert run(*options, "--temperature", 2.0, "--top-k", 1)[1] == greedy
    assert run(*options, "--temperature", 2.0, "--top-p", 1e-6)[1] == greedy
    assert run(*options, "--stop", greedy[3:5])[1] == greedy[: greedy.index(greedy[3:5])] + "\n"
    assert run(*options, "--dtype", "bfloat16")[0] == 0
    made = generate(load(model, weights="int4"), [load_tokenizer(model).encode("a " * 100)], max_new_tokens=20)
    text = load_tokenizer(model).decode(made.tokens[0, : made.lengths[0]].tolist())
    assert run(*options, "--weights", "int4")[1] == text + "\n"


def test_chat_wraps_the_prompt(run, model):
    options = ("generate", "--model", model, "--prompt", "Hi", "--max-new-tokens", 6)
    chat = run(*options, "--chat", "--system", "Be brief.")[1]
    assert chat == expected_text(model, "[system]Be brief.\n[user]Hi\n[assistant]", max_new_tokens=6) + "\n"
    assert run(*options, "--chat")[1] == expected_text(model, "[user]Hi\n[assistant]", max_new_tokens=6) + "\n"


def test_programs_are_kept_for_the_next_run_unless_told_otherwise(run, model, kept, monkeypatch):
    options = ("generate", "--model", model, "--prompt", "Hi", "--max-new-tokens", 3)
    _, wanted, _ = run(*options)
    assert kept == [1]
    assert run(*options, "--no-compilation-cache")[1] == wanted and kept == [1]

    def fail():
        raise PermissionError("/home: expected a directory")

    monkeypatch.setattr(quest_jax, "enable_compilation_cache", fail)
    code, out, err = run(*options)
    assert (code, out) == (0, wanted) and "compiled programs are not kept: /home: expected" in err


def test_plan_prints_a_table_or_json_from_a_config_alone(run, model, tmp_path):
    config = tmp_path / "config.json"
    config.write_bytes((pathlib.Path(model) / "config.json").read_bytes())
    options = ("plan", "--model", config, "--batch", 3, "--max-len", 1000, "--budget", 64, "--prefill-budget", 64)
    code, out, err = run(*options)
    assert (code, err) == (0, "") and out.startswith("3 x 1000 tokens, float32\n")
    assert all(part in out for part in ("weights", "KV", "metadata", "key norms", "temporaries", "programs", "at most"))
    made = quest_jax.plan(load(model), 3, 1000, budget=64, prefill_budget=64)
    planned = json.loads(run(*options, "--json")[1])
    assert planned["weights"] == made.weights and planned["total"] == planned["needed"] == made.total
    assert json.loads(run(*options, "--json", "--dtype", "bfloat16")[1])["kv"] == made.kv // 2
    made = quest_jax.plan(load(model, weights="int8"), 3, 1000, budget=64, prefill_budget=64)
    assert json.loads(run(*options, "--json", "--weights", "int8")[1])["weights"] == made.weights
    assert run(*options, "--weights", "int8")[1].startswith("3 x 1000 tokens, float32, int8 weights\n")


@pytest.mark.parametrize(("arguments", "says"), [
    (("plan", "--model", "MODEL", "--batch", "0"), "batch: expected at least 1, got 0"),
    (("plan", "--model", "MODEL", "--budget", "3"), "budget"),
    (("generate", "--model", "no/such/model", "--prompt", "a"), "no such model"),
    (("generate", "--prompt", "a", "--prompt-file", "b"), "expected --prompt or --prompt-file, got both"),
    (("generate", "--prompt", "a", "--system", "b"), "add --chat"),
    (("generate", "--prompt-file", "no-such-file"), "no-such-file"),
    (("generate", "--model", "MODEL", "--prompt", "a", "--budget", "3"), "budget"),
    (("generate", "--model", "MODEL", "--prompt", "a", "--top-p", "7"), "top_p"),
    (("generate", "--model", "MODEL", "--prompt", "a", "--temperature", "nan"), "temperature"),
    (("generate", "--model", "MODEL", "--prompt", "a", "--max-new-tokens", "0"), "max_new_tokens"),
    (("generate", "--model", "MODEL", "--prompt", ""), "expected a prompt, got an empty text"),
    (("demo", "--model", "MODEL", "--depth", "2"), "depth"),
    (("demo", "--model", "MODEL", "--tokens", "9"), "tokens: expected"),
    (("demo", "--model", "MODEL", "--tokens", "6000"), "4096 positions"),
    (("demo", "--model", "MODEL", "--budgets", "8"), "budget"),
    (("demo", "--model", "MODEL", "--answer", "whale"), "already holds the answer"),
    (("eval", "passkey", "--model", "MODEL", "--tokens", "9", "--budgets", "32"), "n_tokens: expected"),
    (("eval", "passkey", "--model", "MODEL", "--budgets", "8"), "at least one page, 16 tokens, got 8"),
    (("eval", "passkey", "--model", "MODEL", "--tokens", "1500", "--cases", "0"), "n_cases"),
    (("eval", "passkey", "--model", "MODEL", "--methods", "quset"), "full, h2o, keydiff, "),
    (("eval", "passkey", "--model", "MODEL", "--methods", "sample_attention"), "expected those that decode, got 'samp"),
    (("eval", "passkey", "--model", "MODEL", "--tokens", "0"), "--tokens: expected at least 1, got 0"),
    (("eval", "passkey", "--model", "MODEL", "--budgets", "0"), "--budgets: expected at least 1, got 0"),
    (("eval", "passkey", "--model", "MODEL", "--page-size", "0"), "--page-size: expected at least 1, got 0"),
    (("eval", "passkey", "--model", "MODEL", "--batch", "0"), "--batch: expected at least 1, got 0"),
    (("eval", "passkey", "--model", "MODEL", "--basis", "x"), "--basis: expected a method that ranks by a basis"),
    (("eval", "perplexity", "--prefill", "--model", "MODEL", "--tokens", "200"), "more than a chunk of 128 tokens"),
    (("eval", "layers", "--model", "MODEL", "--gap", "nan"), "--gap: expected a finite number, got nan"),
])  # fmt: skip
def test_what_a_caller_gets_wrong_is_one_line(run, model, arguments, says):
    code, out, err = run(*(model if argument == "MODEL" else argument for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("quest-jax: error: ") and says in err
    assert err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("arguments", [(), ("generate", "--bogus", "1"), ("dance",), ("generate", "--budget", "many")])
def test_unknown_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code == 2
    assert "quest-jax" in capsys.readouterr().err


def test_a_missing_terminal_library_comes_with_its_command(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert run("doctor") == (2, "", 'quest-jax: error: the command line needs tyro; pip install "quest-jax[cli]"\n')


def test_no_prompt_at_a_terminal_is_refused(run, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    code, _, err = run("generate")
    assert code == 2 and "expected a prompt, got none" in err


def test_ctrl_c_ends_cleanly(run, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Doctor, "run", interrupt)
    assert run("doctor") == (130, "", "\nquest-jax: interrupted\n")


def test_errors_of_the_library_itself_are_not_hidden(run, monkeypatch):
    def fail(self):
        raise ZeroDivisionError

    monkeypatch.setattr(cli.Doctor, "run", fail)
    with pytest.raises(ZeroDivisionError):
        run("doctor")


def test_a_reader_that_has_gone_ends_the_command_quietly(model):
    command = [sys.executable, "-c", "import sys; from quest_jax import cli; sys.exit(cli.main(sys.argv[1:]))"]
    command += ["generate", "--model", model, "--prompt", "a", "--max-new-tokens", "400"]
    command += ["--no-compilation-cache"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == cli.BROKEN_PIPE


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["generate", "--help"]])
def test_help_and_version_load_no_command(arguments):
    code = f"""if True:
        import sys
        from quest_jax import cli
        try:
            ended = cli.main({arguments})
        except SystemExit as stop:
            ended = stop.code
        assert ended == 0, ended
        loaded = [name for name in ("quest_jax.demo", "quest_jax.evals", "quest_jax.doctor") if name in sys.modules]
        assert not loaded, loaded
    """
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "quest-jax" in result.stdout


def test_doctor_prints_json(run):
    code, out, err = run("doctor", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["ops"]["page_attention"]["uses"] == "xla"
    assert "page_attention" in run("doctor")[1]


@pytest.mark.slow
def test_eval_passkey_prints_a_table(run, model):
    code, out, err = run("eval", "passkey", "--model", model, "--tokens", 1000, "--cases", 3, "--batch", 2,
                         "--budgets=64,32", "--methods", "quest,h2o")  # fmt: skip
    assert (code, err) == (0, "")
    assert "passkey, 1000 tokens; 3 questions decoded by the method, of which dense attention" in " ".join(out.split())
    assert all(name in out for name in ("full", "quest 64", "quest 32", "h2o 64", "oracle 32"))


@pytest.mark.slow
def test_eval_writes_results_and_goes_on_from_them(run, model, tmp_path):
    options = ("--model", model, "--tokens", 1800, "--cases", 2, "--budgets", 64, "--question", "both")
    options = (*options, "--out", tmp_path)
    code, out, err = run("eval", "facts", *options)
    assert code == 0 and ("no plots" in err or not err), err
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert len(before) == 5 and "quest 64" in (tmp_path / "facts.md").read_text()
    rows = {row["name"]: row for row in json.loads((tmp_path / "facts.json").read_text())["lengths"][0]["rows"]}
    assert [*rows] == ["full", "random 64", "sink_window 64", "oracle 64", "quest 64"]
    assert rows["full"]["share"] == 1 and len(rows["quest 64"]["found"]["scores"]["dense"]) == 2
    assert run("eval", "facts", *options)[:2] == (0, out), "nothing is measured again"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    path = next(iter(before))
    path.write_text("{")
    code, _, err = run("eval", "facts", *options)
    assert code == 2 and path.name in err and "damaged" in err and path.read_text() == "{"


@pytest.mark.slow
def test_eval_perplexity_of_a_file(run, model, tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be: that is the question. " * 9)
    options = ("eval", "perplexity", "--model", model, "--text", tmp_path / "text.txt", "--budgets", 32)
    code, out, _ = run(*options, "--tokens", 120, "--texts", 2, "--out", tmp_path / "out")
    assert code == 0 and "236 tokens of text" in " ".join(out.split()) and "perplexity" in out
    rows = json.loads((tmp_path / "out" / "perplexity.json").read_text())["lengths"][0]["rows"]
    assert rows[0]["gap"]["mean"] == 0 and [len(row) for row in rows[-1]["found"]["nll"]] == [118, 118]
    assert "got 387" in run(*options, "--tokens", 400)[2]
    # Other contents are measured anew.
    (tmp_path / "text.txt").write_text("Whether it is nobler in the mind to suffer the slings and arrows. " * 9)
    options = (*options, "--tokens", 120, "--texts", 2)
    assert run(*options, "--out", tmp_path / "out")[1] == run(*options)[1] != out
    assert "a start of at least 1" in run(*options, "--tokens", 120, "--start", 119)[2]


@pytest.mark.slow
def test_eval_fidelity_prints_and_writes_its_rows(run, model, tmp_path):
    code, out, err = run("eval", "fidelity", "--model", model, "--tokens", 400, "--queries", 4, "--budgets", 64,
                         "--methods", "quest", "--out", tmp_path)  # fmt: skip
    assert code == 0 and ("no plots" in err or not err)
    rows = json.loads((tmp_path / "fidelity.json").read_text())["rows"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert len(before) == 5 and "quest 64" in (tmp_path / "fidelity.md").read_text()
    assert run("eval", "fidelity", "--model", model, "--tokens", 400, "--queries", 4, "--budgets", 64, "--methods",
               "quest", "--out", tmp_path)[1] == out  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert [*rows] == ["full", "random 64", "sink_window 64", "oracle 64", "quest 64"]
    assert rows["full"]["share"] == 1 and all(name in out for name in rows)


@pytest.mark.slow
def test_eval_layers_prints_writes_and_draws_what_each_needs(run, model, tmp_path):
    numbers, plot = tmp_path / "layers.json", tmp_path / "layers.png"
    drawn = ("--plot", plot) if importlib.util.find_spec("matplotlib") else ()
    code, out, err = run("eval", "layers", "--model", model, "--tokens", 100, "--decoded", 4, "--budgets", 99, 16,
                         "--json", numbers, *drawn)  # fmt: skip
    assert (code, err) == (0, "")
    assert "the last 4 of 100 tokens" in out and "tokens for 0.01" in out
    found = json.loads(numbers.read_text())
    assert found["budgets"] == [16, 99] and {row[1] for row in found["nll_by_layer_and_budget"]} == {
        round(found["nll_dense"], 6)
    }
    assert set(found["needed"]["perplexity"]) <= {16, 99}
    assert plot.exists() == bool(drawn)


@pytest.mark.slow
def test_calibrate_writes_a_basis_that_fidelity_reads(run, model, tmp_path):
    path = tmp_path / "basis.npz"
    code, out, err = run("calibrate", "loki", path, "--model", model, "--tokens", 300)
    assert (code, out) == (0, "") and "Basis(3 layers, 2 KV heads, 8 channels" in err
    options = ("eval", "fidelity", "--model", model, "--tokens", 400, "--queries", 4, "--budgets", 64)
    options = (*options, "--methods", "loki")
    for basis in ((), ("--basis", path)):
        assert run(*options, *basis, "--out", tmp_path / f"{len(basis)}")[0] == 0
    own, given = (json.loads((tmp_path / i / "fidelity.json").read_text())["rows"]["loki 64"] for i in "02")
    assert own["share"] == given["share"] and own["mass"] != given["mass"]
    path.write_bytes(path.read_bytes()[:-9])
    code, _, err = run(*options, "--basis", path)
    assert code == 2 and "basis.npz: expected a basis that quest-jax calibrate wrote" in err
    assert "expected more than the 8 channels" in run("calibrate", "loki", path, "--model", model, "--tokens", 8)[2]


@pytest.mark.slow
def test_eval_mass_and_needle_print_their_tables(run, model):
    code, out, _ = run("eval", "mass", "--model", model, "--tokens", 700, "--budgets", 64, 128)
    assert code == 0 and "output error" in out
    for name in ("QuoKA 64, tokens", "QuoKA 128, tokens", "QuoKA 64, pages", "QuoKA 128, pages"):
        assert name in out
    code, out, _ = run("eval", "needle", "--model", model, "--tokens", 1500, "--texts", 1, "--budgets", 64)
    assert code == 0 and "3 prompts" in out
    for rule in ("far", "random", "near", "strided", "last", "all"):
        assert f"{rule} " in out


def test_eval_weights_prints_its_table(run, model):
    code, out, _ = run("eval", "weights", "--model", model, "--tokens", 40)
    assert code == 0 and all(part in out for part in ("against float32", "40 tokens", "int8", "int4", "NLL"))
    code, out, _ = run("eval", "weights", "--model", model, "--tokens", 20, "--kinds", "int8", "--dtype", "bfloat16")
    assert code == 0 and "against bfloat16" in out and "int4" not in out


def test_eval_metadata_prints_its_table(run, model):
    code, out, _ = run("eval", "metadata", "--model", model, "--tokens", 700, "--budgets", 64, "--queries", 16,
                       "--candidates", 2)  # fmt: skip
    assert code == 0 and "prose of 700 tokens" in out
    for name in ("float32", "bfloat16", "int8", "two levels", "same pages", "mass kept", "bytes/page", "at 128K"):
        assert name in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("metadata", "--budgets", "8"), "--budgets: expected at least a page, 16 tokens, got [8]."),
        (("metadata", "--queries", "0"), "--queries: expected at least 1, got 0."),
        (("metadata", "--block-pages", "1"), "expected block_pages to be at least 2, got 1."),
        (("mass", "--budgets", "8"), "--budgets: expected at least a page, 16 tokens, got [8]."),
        (("layers", "--decoded", "0"), "decoded: expected at least 1, of a text with 2 tokens before, got 0 of 2048."),
        (("layers", "--budgets", "4096"), "less than the text of 2048 tokens, got [4096]."),
        (("layers", "--plot", "a.svg"), "--plot: expected a .png file in a folder that exists, got a.svg."),
        (("mass", "--tokens", "1000"), "expected a text with a chunk of 128 after more than 1024 tokens"),
        (("needle", "--budgets", "0"), "--budgets: expected at least 1 token, got [0]."),
        (("needle", "--texts", "0"), "expected --texts of at least 1 and 1 to 128 --queries, got 0 and 16."),
        (("needle", "--queries", "129"), "expected --texts of at least 1 and 1 to 128 --queries, got 2 and 129."),
    ],
)
def test_bad_eval_options_are_refused_before_a_model_is_loaded(run, arguments, says):
    code, out, err = run("eval", *arguments, "--model", "/no/such/model")
    assert (code, out) == (2, "") and says in err


@pytest.mark.parametrize("group", ["eval", "bench"])
def test_a_group_without_a_command_lists_its_commands(group, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([group])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    commands = importlib.import_module(f"quest_jax.cli.{cli.GROUPS[group][0]}").COMMANDS
    assert len(commands) > 5 and all(command in said for command in commands)
