"""What agents read, made from the documentation: `docs/llms.txt` and `skills/staticmem/SKILL.md`.

    python scripts/pages/agent_files.py

`llms.txt` lists the pages with what each is for (llmstxt.org); SKILL.md is `docs/agents.md` with the
name and description that loaders of skills ask for (agentskills.io).
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SUMMARY = (
    "staticmem predicts the GPU memory of a PyTorch or ONNX model from its exported graph alone: no GPU, no weights, "
    "no training run. Whether a training step or an inference fits a card, which batch and which card, what would make "
    "it smaller."
)
SKILL = """---
name: staticmem
description: Predicts the GPU memory of a PyTorch or ONNX model before it runs. Use it when somebody asks whether a \
training step or an inference fits a GPU, which batch size or which GPU, what would reduce memory, or why CUDA ran \
out of memory.
---

"""


def purpose(page: Path) -> str:
    """What a page is for: its first sentence, without links and without "This page has"."""
    text = page.read_text(encoding="utf-8").partition("\n\n")[2]
    sentence = re.split(r"(?<=\.)\s", " ".join(text.partition("\n\n")[0].split()))[0].rstrip(".:")
    sentence = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence)
    return re.sub(r"^This page (says |describes |has |lists |explains |defines |is )?", "", sentence)


def llms_text() -> str:
    lines = ["# staticmem", "", f"> {SUMMARY}", ""]
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for part in re.split(r"^## ", index, flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        targets = [target for target in re.findall(r"\]\(([^)#]+\.md)\)", body) if not target.startswith("..")]
        section = "Optional" if title == "For contributors" else title  # what a reader with little room may leave out
        lines += [f"## {section}", ""]
        for target in dict.fromkeys(targets):
            heading = (DOCS / target).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            lines.append(f"- [{heading}]({target}): {purpose(DOCS / target)}")
        lines.append("")
    return "\n".join(lines)


def skill_text() -> str:
    page = (DOCS / "agents.md").read_text(encoding="utf-8")
    page = page.replace("# For agents and scripts\n", "# staticmem\n", 1)
    page = page.replace(" `skills/staticmem/SKILL.md` is made from it.", "", 1)
    return SKILL + re.sub(r"\]\((?!https?:)([^)]+)\)", r"](../../docs/\1)", page)


def documents() -> dict[Path, str]:
    """The files with their texts."""
    return {DOCS / "llms.txt": llms_text(), ROOT / "skills" / "staticmem" / "SKILL.md": skill_text()}


if __name__ == "__main__":
    for path, text in documents().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
