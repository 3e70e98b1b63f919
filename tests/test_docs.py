"""The README and the pages: their Python runs, their links lead somewhere, their pictures say what they show."""

import doctest
import importlib
import inspect
import json
import re
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import remat

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"!\[(.*?)\]\((\S+?)\)", re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((\S+?)\)")

Repository = runpy.run_path(str(ROOT / "hatch_build.py"))["Repository"]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(page: Path) -> str:
    """A page without its code."""
    return FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


@each_page
def test_page(page: Path) -> None:
    namespace: dict[str, object] = {}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], page, "exec"), namespace)


@each_page
def test_pictures_are_there_and_say_what_they_show(page: Path) -> None:
    text = text_of(page)
    assert "<img" not in text, "write ![what it shows](file)"
    for alt, file in IMAGE.findall(text):
        assert (page.parent / file).is_file(), file
        assert len(alt.split()) >= 5, f"{file}: say what the picture shows to who can't see it"


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(text_of(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


CODE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@each_page
def test_code_fits_on_a_narrow_page(page: Path) -> None:
    wide = [line for block in CODE.findall(page.read_text()) for line in block.splitlines() if len(line) > 76]
    assert not wide


PUBLIC = (
    "remat",
    "remat.compat",
    "remat.debug",
    "remat.integrations.transformers",
    "remat.nn",
    "remat.policies",
    "remat.random",
)


@pytest.mark.parametrize("module", PUBLIC)
def test_examples_in_docstrings_fit_on_a_narrow_page(module: str) -> None:
    public = vars(importlib.import_module(module))
    docs = [inspect.getdoc(public[name]) or "" for name in public["__all__"]]
    examples = [example for doc in docs for example in doctest.DocTestParser().get_examples(doc)]
    assert examples
    lines = [f">>> {line}" for example in examples for line in example.source.splitlines()]
    lines += [line for example in examples for line in example.want.splitlines()]
    assert not [line for line in lines if len(line) > 76]


def test_code_of_the_tutorial_fits_on_a_narrow_page() -> None:
    cells = json.loads((ROOT / "examples" / "tutorial.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert not [line for cell in code for line in cell.splitlines() if len(line) > 76]


def test_the_front_page_has_the_version() -> None:
    assert f"remat {remat.__version__} needs" in (DOCS / "index.md").read_text()


def test_the_reference_shows_the_signature_of_remat() -> None:
    shown = re.search(r"^```py\nremat\((.*?)\)\n```", (DOCS / "reference" / "remat.md").read_text(), re.M | re.S)
    assert shown is not None
    named = inspect.signature(remat.remat).parameters.values()
    real = [f"{p.name}={p.default!r}" for p in named if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert re.findall(r"\w+=[^,\n]+(?=,)", shown[1]) == real


def test_every_policy_is_described_in_the_reference() -> None:
    listed = re.findall(
        r"^::: remat\.policies\.(\w+)|^\| `(\w+)`", (DOCS / "reference" / "policies.md").read_text(), re.M
    )
    assert sorted(a or b for a, b in listed) == sorted(remat.policies.__all__)


def test_every_picture_is_shown() -> None:
    shown = {(page.parent / file).resolve() for page in PAGES for _, file in IMAGE.findall(page.read_text())}
    assert {file.resolve() for file in (DOCS / "images").iterdir()} == shown


@pytest.mark.parametrize("file", sorted((DOCS / "images").glob("*.svg")), ids=lambda file: file.name)
def test_drawings_have_a_title_and_a_description(file: Path) -> None:
    svg = "{http://www.w3.org/2000/svg}"
    root = ET.parse(file).getroot()
    assert root.findtext(f"{svg}title")
    assert root.findtext(f"{svg}desc")


def resolve(dotted: str) -> object:
    """The thing of a dotted name."""
    parts = dotted.split(".")
    for i in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(dotted)


def test_every_name_in_the_migration_from_jax_exists() -> None:
    text = (DOCS / "migrating-from-jax.md").read_text()
    names = set(re.findall(r"`((?:remat|torch|optree)(?:\.\w+)+)`", text))
    assert len(names) > 20
    for name in names:
        resolve(name)
    _, _, samplers = text.partition("| `jax.random` |")
    same = [
        name for row in re.findall(r"^\| (.*) \| the same \|$", samplers, re.M) for name in re.findall(r"`(\w+)`", row)
    ]
    only_here = re.findall(r"`remat\.random\.(\w+)`", samplers)
    public = {name for name, value in vars(remat.random).items() if name[0] != "_" and callable(value)}
    assert sorted(same + only_here) == sorted(public)
    policies = re.findall(r"^\| `(\w+)` \| `remat\.policies\.(\w+)` \|$", text, re.M)
    assert len(policies) == 12
    assert all(jax_name == ours for jax_name, ours in policies)


def test_remat_does_all_that_the_readme_says_beside_the_others() -> None:
    features = runpy.run_path(str(ROOT / "bench" / "peers" / "features.py"))
    done = {name: features["attempt"](name, remat.remat) for name in features["PROGRAMS"]}
    expected = dict.fromkeys(features["PROGRAMS"], "yes")
    expected["a running average in a dict"] = "CheckpointError"
    assert done == expected


def metadata(address: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the wheel says of the repository at this address."""
    monkeypatch.setenv("REPOSITORY", address)
    found: dict[str, Any] = {}
    Repository(str(ROOT), {}).update(found)
    return found


def test_readme_on_pypi_leads_to_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "https://example.org/someone/remat"
    found = metadata(address, monkeypatch)
    readme, text = (ROOT / "README.md").read_text(), found["readme"]["text"]
    for links, kind in ((LINK, "blob"), (IMAGE, "raw")):
        before, after = ([match[links.groups] for match in links.finditer(t)] for t in (readme, text))
        assert before
        assert after == [p if "://" in p else f"{address}/{kind}/main/{p}" for p in before]
    assert all(url.startswith(address) for url in found["urls"].values())


def test_readme_without_an_address_has_no_links_to_files(monkeypatch: pytest.MonkeyPatch) -> None:
    found = metadata("", monkeypatch)
    text = found["readme"]["text"]
    assert not IMAGE.search(text)
    assert all("://" in match[1] for match in LINK.finditer(text))
    assert "urls" not in found
