"""The tables and plots of :mod:`quest_jax.evals.study`, and their places in its document."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from quest_jax.evals import fidelity_cells, plots, report
from quest_jax.evals.fidelity import FIRST_LAYER
from quest_jax.evals.interval import Interval, bootstrap
from quest_jax.evals.report import Row
from quest_jax.evals.retention import Found
from quest_jax.evals.study import Study
from quest_jax.tables import Table, check_place, write_place

_STRETCH = 16  # tokens that the bootstrap draws together
SHOWN = ("quest", "quest_box", "oracle_pages", "sparq", "sink_window", "twilight", "h2o")
PLOT_PREFIX = "study"
# Of each part, the tables that it brings; a document has a place for each.
TABLES = {
    "decode": ("decode", "against"), "again": ("again",), "fidelity": ("fidelity",), "pages": ("pages",),
    "prefill": ("prefill",), "long": ("long",), "map": ("map",), "from-start": ("from-start",),
}  # fmt: skip


def tables(study: Study) -> dict[str, Table]:
    """All tables that the study has results for, by their key."""
    sizes, found = study.sizes, {}
    for key, title in (
        ("decode", "decoding, contexts of {tokens} tokens"),
        ("prefill", "reading prompts, contexts of {tokens} tokens; decoding is dense"),
        ("long", "decoding, contexts of {long_tokens} tokens"),
        ("from-start", "perplexity from the first token on, texts of {from_start} tokens"),
    ):
        if key in study.kept:
            about = f"{title.format(**vars(sizes))}; {report.counts(study.kept[key])}; seed {sizes.seed}"
            found[key] = report.table(report.rows(study.kept[key]), about)
    if "decode" in study.kept:
        found["against"] = against(study.kept["decode"])
    if "again" in study.kept:
        found["again"] = against(study.kept["again"])
    if 16 in study.attention:
        about = f"the last {sizes.queries} tokens of {sizes.fidelity_texts} texts of {sizes.tokens}"
        title = f"attention kept, {about}; means over layers from the third on, and heads"
        found["fidelity"] = fidelity_cells.table(study.attention[16], title)
    pages = _pages(study)
    if len(pages) > 1:
        found["pages"] = Table("Quest by page size", *_pages_cells(study, pages))
    lengths = [length for length in sizes.lengths if f"map {length}" in study.kept]
    if lengths:
        found["map"] = _map_table(study, lengths)
    return found


def against(found: Mapping[str, Found], base: str = "quest_mean") -> Table:
    """Every method against ``base`` at equal bytes: differences of the same tokens and questions, with intervals.

    Most rankings of pages let a group agree by the mean, so that what differs from ``quest_mean`` is the ranking.

    Between its budgets ``base`` is interpolated, token by token and question by question, in the logarithm of the
    bytes; what reads less or more than all of them is left out.
    """
    points = sorted((np.log(one.share), one) for name, one in found.items() if name.rsplit(" ", 1)[0] == base)
    rows = []
    for name, one in found.items():
        if name.rsplit(" ", 1)[0] in (base, "full"):
            continue
        at = np.log(one.share)
        after = next((i for i, (share, _) in enumerate(points) if share >= at), None)
        if not points or after is None or (after == 0 and points[0][0] > at + 1e-3):
            continue
        (low, left), (high, right) = points[max(0, after - 1)], points[after]
        weight = 1.0 if high == low else (at - low) / (high - low)

        def of(values, left: Found = left, right: Found = right, weight: float = weight):
            return (1 - weight) * values(left) + weight * values(right)

        cells = [name, f"{one.share:.1%}"]
        kl = _flat(one.kl) - of(lambda each: _flat(each.kl))
        cells.append(_signed(bootstrap(kl.tolist(), _stretches(one.kl)), 4))
        for mode in one.scores:
            scores = np.asarray(one.scores[mode]) - of(lambda each, mode=mode: np.asarray(each.scores[mode]))
            cells.append(_signed(bootstrap(scores.tolist()), 2))
        rows.append(cells)
    modes = [{"sparse": "right", "dense": "question dense: right"}[mode] for mode in found["full"].scores]
    headings = ["method, budget", "bytes of dense", "KL", *modes]
    return Table(f"difference to `{base}` at equal bytes; * where the interval has no 0", headings, rows)


def _flat(rows: Sequence[Sequence[float]]) -> np.ndarray:
    return np.concatenate([np.asarray(row, np.float64) for row in rows])


def _stretches(rows: Sequence[Sequence[float]]) -> list[int]:
    return [1000 * i + token // _STRETCH for i, row in enumerate(rows) for token in range(len(row))]


def _signed(one: Interval, digits: int) -> str:
    mean, low, high = (round(value, digits) + 0.0 for value in one)  # no -0.0
    star = "*" if low > 0 or high < 0 else ""
    return f"{mean:+.{digits}f}{star} [{low:+.{digits}f}, {high:+.{digits}f}]"


def _pages(study: Study) -> dict[int, dict[str, Found]]:
    """What Quest kept, by page size."""
    sizes = {size: study.kept.get(f"page {size}") for size in study.sizes.page_sizes}
    return {size: one for size, one in ({16: study.kept.get("decode")} | sizes).items() if one is not None}


def _pages_cells(study: Study, pages: Mapping[int, Mapping[str, Found]]) -> tuple[list[str], list[list[str]]]:
    headings, rows = [], []
    for size, found in sorted(pages.items()):
        quests = {name: one for name, one in found.items() if name == "full" or name.rsplit(" ", 1)[0] == "quest"}
        headings, cells = report.cells(report.rows(quests))
        attention = study.attention.get(size)
        for row in cells:
            kept = "-" if attention is None else f"{fidelity_cells.mean_of(attention[row[0]], 'mass'):.3f}"
            rows += [[f"page {size}, {row[0]}", *row[1:3], kept, *row[3:]]] if row[0] != "full" else []
    return [*headings[:3], "mass", *headings[3:]], rows


def _map_table(study: Study, lengths: Sequence[int]) -> Table:
    names = [*study.kept[f"map {lengths[0]}"]]
    rows = [
        [f"{length}", *(f"{sum(study.kept[f'map {length}'][name].scores['sparse']):g}" for name in names)]
        for length in lengths
    ]
    return Table(f"passkeys found of {study.sizes.depths}, by length", ["tokens", *names], rows)


def markers(key: str) -> tuple[str, str]:
    """The comments between which a document holds a table."""
    return f"<!-- study {key}: written by quest-jax eval study -->", f"<!-- study {key}: end -->"


def check_places(path: pathlib.Path, parts: Sequence[str]) -> None:
    """Checks that a document has a place for every table of these parts.

    Raises:
      ValueError: it has not, or is not there.
    """
    if not path.exists():
        raise ValueError(f"{path}: expected a document with places for the tables, such as docs/study.md.")
    for part in parts:
        for key in TABLES[part]:
            check_place(path, *markers(key))


def write(path: pathlib.Path, study: Study) -> None:
    """Writes every table into its place."""
    for key, table in tables(study).items():
        if table.rows:
            write_place(path, *markers(key), table.for_document())


def check_plots(folder: pathlib.Path) -> None:
    """Checks that plots can be drawn into a folder.

    Raises:
      ValueError: there is no such folder.
      ImportError: matplotlib is not installed.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder that exists, for the plots.")
    plots.check()


def draw(folder: pathlib.Path, study: Study) -> None:
    """Draws what the study has results for."""

    def path(name: str) -> pathlib.Path:
        return folder / f"{PLOT_PREFIX}-{name}.png"

    for part, title in (("decode", "decoding"), ("prefill", "reading the prompt"), ("long", "decoding, long contexts")):
        if part in study.kept:
            _draw_rows(report.rows(study.kept[part]), part, title, path)
    if 16 in study.attention:
        middle = study.sizes.budgets[min(1, len(study.sizes.budgets) - 1)]
        shown = {
            name: texts for name, texts in study.attention[16].items() if name in {f"{one} {middle}" for one in SHOWN}
        }
        plots.by_layer(
            fidelity_cells.by_layer(shown, "mass"), path("layers"), ylabel="attention on what was read",
            first_layer=FIRST_LAYER, title=f"budget of {middle} tokens",
        )  # fmt: skip
        masses = fidelity_cells.curves(study.attention[16], "mass")
        masses = {name: points for name, points in masses.items() if name != "full"}
        named = [name for name in SHOWN if name in masses]
        plots.against_bytes(masses, path("mass"), ylabel="attention on what was read", highlight=named)
    pages = _pages(study)
    if len(pages) > 1:
        kls = {
            f"pages of {size}": report.curves(report.rows(one), "kl")["quest"] for size, one in sorted(pages.items())
        }
        plots.against_bytes(
            kls, path("pages"), ylabel="KL to dense attention, nats", title="Quest by page size", log=True
        )
    lengths = [length for length in study.sizes.lengths if f"map {length}" in study.kept]
    if lengths:
        name = f"quest {study.sizes.map_budget}"
        parts = {length: (study.contexts[f"map {length}"], study.kept[f"map {length}"][name]) for length in lengths}
        plots.heat_map(report.by_depth(parts, "sparse"), path("passkey"), title=f"passkeys found, {name}")


def _draw_rows(lines: Sequence[Row], part: str, title: str, path) -> None:
    shown = [name for name in (SHOWN if part != "prefill" else ()) if any(line.method == name for line in lines)]
    if kls := report.curves(lines, "kl"):
        plots.against_bytes(
            {name: points for name, points in kls.items() if name != "full"}, path(f"{part}-kl"),
            ylabel="KL to dense attention, nats", title=title, highlight=shown, log=True,
        )  # fmt: skip
    mode = "dense" if part == "prefill" else "sparse"
    if kept := report.curves(lines, "kept", mode):
        plots.against_bytes(
            kept, path(f"{part}-facts"), ylabel="share of dense attention's answers", title=title, highlight=shown
        )
