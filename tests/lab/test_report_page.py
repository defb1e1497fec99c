"""The report: numbers that can be read back and traced, what is missing, and the page in a real browser."""

import csv
import html
import json
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest

from fedlaw.experiments.conduct import note_sweep, run_sweep
from fedlaw.experiments.sweep import Sweep
from fedlaw.report.cells import Entry, collect
from fedlaw.report.html import write
from fedlaw.report.tables import Table, comma_separated, latex, markdown, tables
from fedlaw.results import Store

SHOW = [
    {
        "kind": "table",
        "title": "Test accuracy (%)",
        "split": "attack",
        "rows": "method",
        "columns": ["q", "malicious"],
        "value": "test_accuracy",
        "worst": "attack",
        "published": {
            "file": "accuracy_mnist.csv",
            "keys": {"attack": "attack", "method": "method", "q": "q", "malicious": "fraction_malicious"},
            "value": "accuracy_mean",
            "std": "accuracy_std",
        },
    },
    {
        "kind": "lines",
        "title": "Against the share",
        "x": "malicious",
        "lines": "method",
        "panels": ["attack"],
        "value": "test_accuracy",
    },
    {
        "kind": "curves",
        "title": "Curves",
        "value": "test_accuracy",
        "x": "communication",
        "lines": "method",
        "panels": [],
    },
    {"kind": "weights", "title": "Weights", "panels": ["method"]},
]
SWEEP = {
    "name": "small table",
    "title": "A table <of> our own & its </script> figures",
    "seeds": 2,
    "base": {"clients": 20, "rounds": 3, "examples": 400, "q": 0.6, "model_settings": {"hidden": [8]}},
    "axes": {
        "attack": {"Flipping Label": {"attack": "label_flip"}, "Lie Attack": {"attack": "lie"}},
        "q": [0.6],
        "malicious": [0.1, 0.4],
        "method": {"FedLAW": {"rule": {"name": "fedlaw", "preset": "paper"}}, "FedAVG": {"rule": "mean"}},
    },
    "show": SHOW,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """All of the sweep but one run: a seed more was asked for in one cell."""
    path = tmp_path_factory.mktemp("report") / "r.sqlite"
    sweep = Sweep.parse(SWEEP)
    run_sweep(sweep, path, processes=1, measure=False)
    more = Sweep.parse({**SWEEP, "seeds": [2]}).only({"method": ["FedAVG"], "attack": ["Lie Attack"]})
    note_sweep(path, more, more.planned()[:1])
    return path


@pytest.fixture(scope="module")
def page(store, tmp_path_factory):
    return write(store, tmp_path_factory.mktemp("page") / "deep" / "report")


def accuracies(store, **labels):
    """Accuracy in percent of each seed, straight from the store."""
    planned = [p for p in Sweep.parse(SWEEP).planned() if labels.items() <= p.labels.items()]
    with Store(store, read_only=True) as opened:
        return [100 * opened.find(p.experiment.id).summary["test_accuracy"] for p in planned]


def test_no_row_of_dashes_for_what_a_rule_never_says(store):
    """FedAvg tells nobody apart; what has not been run yet keeps its row."""
    (found,) = collect(store)
    show = {"rows": ["method", "attack"], "columns": ["q"], "values": ["recall"]}
    (table,) = tables(found, show)
    assert [labels for labels, _ in table.rows] == [
        *(("FedLAW", attack) for attack in ("Flipping Label", "Lie Attack")),
        ("FedAVG", "Lie Attack"),  # of this cell a run is missing
    ]


def test_entries_are_mean_and_deviation_of_the_runs(store):
    (found,) = collect(store)
    flip, lie, worst = tables(found, found.sweep.show[0])
    assert flip.columns == [("q = 0.6", "10%"), ("q = 0.6", "40%")]
    assert [labels for labels, _ in flip.rows] == [("FedLAW",), ("FedAVG",)]
    values = accuracies(store, attack="Flipping Label", malicious=0.4, method="FedAVG")
    each = flip.rows[1][1][1]
    assert each.mean == statistics.fmean(values)
    assert each.std == statistics.stdev(values)
    assert each.published == 77.71
    assert each.difference == each.mean - each.published
    assert worst.rows[1][1][1].mean == min(flip.rows[1][1][1].mean, lie.rows[1][1][1].mean)
    assert worst.rows[1][1][-1].mean == min(e.mean for e in worst.rows[1][1][:-1])
    assert worst.columns[-1][0] == "worst"


def test_best_of_each_column_is_bold_and_ties_share():
    from fedlaw.report.tables import _with_bold

    def of(mean):
        return Entry(mean, 0.0, ("r",), {"r": mean or 0.0})

    rows = [
        (("a",), [of(90.001), of(None)]),
        (("b",), [of(90.004), of(50.0)]),
        (("c",), [of(80.0), of(60.0)]),
    ]
    table = _with_bold(Table("t", ("method",), [("x",), ("y",)], rows, ["test_accuracy"] * 2))
    assert table.bold == {(0, 0), (1, 0), (2, 1)}


def test_entries_of_fewer_seeds_than_the_others_say_so():
    full = Entry(90.0, 1.0, ("r", "s"), {"r": 89.0, "s": 91.0})
    half = Entry(80.0, 0.0, ("t", "u"), {"t": 80.0})
    none = Entry(None, None, ("v",), {})
    rows = [(("a",), [full, half, none])]
    table = Table("t", ("method",), [("x",), ("y",), ("z",)], rows, ["test_accuracy"] * 3)
    assert table.seeds == 2
    assert markdown(table).splitlines()[-1] == "| a | 90.00 ± 1.00 | 80.00 (n=1) | - |"
    assert "80.00 (n=1)" in latex(table)


def test_tables_as_files_say_the_same(store, page):
    (found,) = collect(store)
    made = tables(found, found.sweep.show[0])
    rows = list(csv.DictReader((page.parent / "small-table.csv").open(encoding="utf-8")))
    assert comma_separated(made) == (page.parent / "small-table.csv").read_text("utf-8")
    first = made[0].rows[0][1][0]
    assert float(rows[0]["mean"]) == first.mean
    assert rows[0]["runs"].split() == list(first.runs)
    shown = f"{first.mean:.2f} ± {first.std:.2f}"
    assert shown in markdown(made[0])
    assert shown.replace(" ± ", "$\\pm$") in latex(made[0])
    assert f"[{first.published:.2f}, {first.difference:+.2f}]" in markdown(made[0])
    assert r"\caption{Test accuracy (\%): Flipping Label}" in (page.parent / "small-table.tex").read_text(
        "utf-8"
    )
    assert latex(made[0]).count(r"\textbf{") == len(made[0].bold)


def test_every_number_can_be_traced(store, page):
    data = page_data(page)
    with Store(store, read_only=True) as opened:
        for cell in data["cells"]:
            for run, value in cell["values"].items():
                info = opened.find(run)
                assert value == 100 * info.summary["test_accuracy"]
                about = data["runs"][run]
                described = json.loads(data["descriptions"][about["description"]])
                assert described | {"seed": about["seed"]} == info.description
                assert data["versions"][about["versions"]] == info.versions
    rows = list(csv.DictReader((page.parent / "runs.csv").open(encoding="utf-8")))
    assert len(rows) == 17
    assert json.loads(rows[0]["description"])["seed"] == int(rows[0]["seed"])


def page_data(page):
    text = page.read_text("utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1].replace("<\\/", "</"))


def test_what_is_missing_is_said(page):
    text = page.read_text("utf-8")
    assert "16 of 17 runs finished" in text
    assert "1 runs are missing" in text
    assert "not run yet" in text


def test_the_page_needs_no_network_and_escapes_what_it_is_given(page):
    text = page.read_text("utf-8")
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)
    assert "@import" not in text
    assert "url(" not in text
    assert html.escape(SWEEP["title"]) in text
    assert text.count("</script>") == 2
    for name in ("small-table-2.png", "small-table-2.pdf", "small-table-4.png", "small-table.md"):
        assert (page.parent / name).stat().st_size > 500


def test_single_runs_have_a_report_too(tmp_path):
    from fedlaw.experiments.runner import run

    run(clients=20, rounds=1, examples=300, rule="median", store=tmp_path / "a.sqlite")
    text = write(tmp_path / "a.sqlite", tmp_path / "out").read_text("utf-8")
    assert "Runs that belong to no sweep" in text
    assert "no attack" in text
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be made"):
        write(tmp_path / "a.sqlite", tmp_path / "file")


@pytest.mark.parametrize("axes", [{}, {"rule": ["mean"], "attack": ["lie", "label_flip"], "q": [0.6]}])
def test_a_sweep_that_asks_for_nothing_is_shown_all_the_same(tmp_path, axes):
    base = {**SWEEP["base"], "malicious": 0.3, "rounds": 1}
    sweep = Sweep.parse({"name": "plain", "base": {k: base[k] for k in base if k not in axes}, "axes": axes})
    run_sweep(sweep, tmp_path / "a.sqlite", processes=1, measure=False)
    page = write(tmp_path / "a.sqlite", tmp_path / "out")
    assert len(page_data(page)["cells"]) == (
        4 if axes else 1
    )  # two attacks, the worst of them, the worst of all
    assert len(page_data(page)["charts"]) == (1 if axes else 0)


# ------------------------------------------------------------------------------------------ in a browser
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-logging=stderr", "--virtual-time-budget=3000"),
)


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """A function that opens a page in chromium and gives its document and what was said on the console."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no chromium here: apt-get install chromium")

    def browse(page: Path, width: int) -> tuple[str, list[str]]:
        profile = tmp_path_factory.mktemp("profile")
        command = [program, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},900", "--dump-dom"]
        out = subprocess.run(
            [*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        return out.stdout, [line for line in out.stderr.splitlines() if "CONSOLE" in line]

    return browse


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_works_in_a_browser(store, page, browse, width):
    """No console errors, nothing wider than the window, every chart drawn, the numbers those of the store."""
    document, console = browse(page, width)
    assert console == []
    assert 'data-overflow="0"' in document
    assert 'data-charts="5"' in document  # two shares, one of curves, two of weights
    assert document.count("<svg") == 5
    values = accuracies(store, attack="Lie Attack", malicious=0.1, method="FedLAW")
    (found,) = collect(store)
    number = next(
        i
        for i, cell in enumerate(page_data(page)["cells"])
        if cell["title"] == "Test accuracy (%): Lie Attack, FedLAW, q = 0.6 10%"
    )
    button = re.search(rf'<button type="button" data-cell="{number}">(.*?)</button>', document)[1]
    text = " ".join(html.unescape(re.sub("<[^>]+>", " ", button)).split())
    mean, std = statistics.fmean(values), statistics.stdev(values)
    assert text.startswith(f"{mean:.2f} ± {std:.2f} 92.72 ({mean - 92.72:+.2f})")
    assert found.sweep.name == "small table"


def test_a_number_opens_its_origin(store, page, browse):
    """A click on a cell shows the ids of its runs and their description."""
    text = page.read_text("utf-8")
    click = '<script>document.querySelector("[data-cell]").click()</script></body>'
    clicked = page.with_name("clicked.html")
    clicked.write_text(text.replace("</body>", click), "utf-8")
    document, console = browse(clicked, 1280)
    assert console == []
    opened = document[document.index("<dialog") : document.index("</dialog>")]
    assert opened.startswith('<dialog id="origin" open')
    for run in page_data(page)["cells"][0]["runs"]:
        assert run in opened
    assert html.escape('"name": "fedlaw"', quote=False) in opened
    assert "torch" in opened
