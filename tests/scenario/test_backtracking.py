"""`--freeze` ends whatever the pattern and the file's names are, and still takes what people write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import staticmem
from staticmem.cli.main import main
from staticmem.errors import UsageError
from staticmem.scenario import backtracking
from staticmem.scenario.backtracking import searcher

ROOT = Path(__file__).parents[2]
LETTERS = "a" * 60
LAYERS = [
    f"model.encoder.layers.{n}.{part}.{kind}"
    for n in range(96)
    for part in (
        "self_attn.q_proj",
        "self_attn.out_proj",
        "mlp.fc1.base_layer",
        "input_layernorm",
        "mlp.lora_A.default",
    )
    for kind in ("weight", "bias")
]


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$", "(a*)*$", "(a|a)*$", "(a|aa)+$", "(?:a|a?)+$", "^(([a-z])+.)+[A-Z]$", "(.*a){20}$",
        "a?" * 40 + "a" * 40 + "$",
        "(?:a?){60}a{60}b", ".*.*.*.*.*.*x", "(?=(a+)+b)", "(?!(a+)+b)", "(?i)(A+)+$", "(?i:(A+)+)$",
        r"(a+)\1+$", "(?s)(.+)+x",
        r"(?:(?:\b|\b)+){30}!", r"(?:\b|\b){60}!",
        "((a{0,5}){0,5}){0,5}b", "(?:(?:)+)+" * 3 + "(a+)+$", r"(?:\b){60000}(?:\b){60000}(a|a)+$",
        "(" * 150 + "a" + ")*" * 150,
    ],
)  # fmt: skip
def test_what_could_take_for_ever_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError) as error:
        searcher(pattern, [LETTERS, "fc.weight"])
    assert error.value.code == "SM162"


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?!fc\.)", ".*", ".*bias$", r".*attn.*weight.*", r".*layers.*attn.*q_proj.*weight.*", r"layers\.(1|2|3)\.",
        r"^(?!.*(lora|adapter)).*$", r"layers\.\d+\.(self_attn|mlp)\..*(?<!base_layer)\.weight", r"(layers\.\d+\.)+mlp",
        r"(\w+\.)+bias", "(a+)+$", "(?i)LORA", r"^(model\.)?(encoder|decoder)\.(layers|blocks)\.[0-9]{1,2}\.", "",
    ],
)  # fmt: skip
def test_what_people_write_is_python_s(pattern: str) -> None:
    search = searcher(pattern, LAYERS)
    assert [name for name in LAYERS if search(name)] == [name for name in LAYERS if re.search(pattern, name)]


def test_names_of_any_length_are_not_searched() -> None:
    with pytest.raises(UsageError, match="2,000 characters") as error:
        searcher("bias", ["a" * 2000])
    assert error.value.code == "SM162"
    assert searcher("bias", [])("bias")


PIECES = st.recursive(
    st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\b", "$", "^", r"\w"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: f"(?:{'|'.join(each)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
        inner.map(lambda one: f"(?={one})"),
        inner.map(lambda one: f"(?!{one})"),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(PIECES, st.text("ab", max_size=7))
@example(r"(?=(?:(?:\b|\b))+)", "")
@example(r"(?:(?:\b|\b)+){2}b", "a")
def test_the_count_is_no_less_than_the_ways_there_are(pattern: str, text: str) -> None:
    """Against a matcher that goes back, written down from its definition, and counts each item that it tries."""
    try:
        re.compile(pattern)
    except re.error:
        assume(False)
    items = backtracking._parser.parse(pattern)
    try:
        counted = backtracking._Count(items, len(text), text).steps(10**5)
    except backtracking._TooManyError:
        return
    tried = _tried(items, text)
    assert tried <= counted


def _tried(items: Any, text: str) -> int:
    """Items that are tried until every way of every start has failed."""
    count = 0

    def each(rest: list[tuple[str, Any]], at: int) -> list[int]:
        """The positions behind a sequence, one for each way to it."""
        nonlocal count
        if not rest:
            return [at]
        (op, what), *later = rest
        count += 1
        return [end for middle in one(op, what, at) for end in each(later, middle)]

    def of(parsed: Any) -> list[tuple[str, Any]]:
        return [(str(op), what) for op, what in parsed]

    def one(op: str, what: Any, at: int) -> list[int]:
        if op == "LITERAL":
            return [at + 1] if at < len(text) and ord(text[at]) == what else []
        if op in (
            "NOT_LITERAL",
            "IN",
            "ANY",
        ):  # each of these reads one character; which one it refuses does not matter
            return [at + 1] if at < len(text) else []
        if op == "AT":
            name = str(what)
            stays = at == 0 if name == "AT_BEGINNING" else at == len(text) if name == "AT_END" else True
            return [at] if stays else []
        if op == "BRANCH":
            return [end for branch in what[1] for end in each(of(branch), at)]
        if op == "SUBPATTERN":
            return each(of(what[-1]), at)
        if op in ("ASSERT", "ASSERT_NOT"):
            each(of(what[1]), at)
            return [at]
        low, high, body = what
        return turns(of(body), at, int(low), int(high), 0)

    def turns(body: list[tuple[str, Any]], at: int, low: int, high: int, turn: int) -> list[int]:
        found = [at] if turn >= low else []
        if turn < high:
            for end in each(body, at):
                if end > at or turn < low:
                    found += turns(body, end, low, high, turn + 1)
        return found

    for start in range(len(text) + 1):
        each(of(items), start)
    return count


def test_the_command_line_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "models" / "resnet18.pt2")
    assert main(["analyze", path, "--optimizer", "sgd", "--freeze", "(.+)+X"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: --freeze '(.+)+X' would take too long [SM162]"
    assert len(lines) == 3
    with pytest.raises(UsageError, match="too long"):
        staticmem.analyze(path, optimizer="sgd", freeze="(.+)+X")
