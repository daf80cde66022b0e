"""Page of all reported numbers: `python -m tools.metrics_page > docs/metrics.md`."""

import textwrap

from moefold.metrics.definitions import GROUPS, MISREAD


def metrics_page() -> str:
    """Return the text of the page `docs/metrics.md`."""
    lines = [
        "# Every reported number",
        "",
        "<!-- From src/moefold/metrics/definitions.toml: `python -m tools.metrics_page > docs/metrics.md`. -->",
        "",
        "What each number of a run counts, and its name in Megatron-LM, torchtitan, transformers (HF), TRL and vLLM.",
        "`moefold inspect --definitions` prints this page. The text on the console, `metrics.jsonl`, the trackers, the",
        "board and the API show one record.",
        "",
        "## Often misread",
        "",
        *(f"* {text}" for text in MISREAD),
        "",
    ]
    for group in GROUPS:
        lines += [f"## {group.title}", ""]
        lines += [*textwrap.wrap(group.intro, 120), ""] if group.intro else []
        lines += ["| name | unit | what it counts | elsewhere |", "| --- | --- | --- | --- |"]
        for one in group.metrics:
            cells = (f"`{one.name}`", one.unit, one.counts, one.elsewhere)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(metrics_page(), end="")
