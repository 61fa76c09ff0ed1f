"""Draw the pictures of docs/how-it-works.md, as SVG that follows the reader's light or dark setting.

python docs/site/pictures.py docs/pictures
"""

from __future__ import annotations

import sys
from pathlib import Path

STYLE = """
  .paper { fill: #ffffff } .ink { fill: #1c1c1c } .soft { fill: #595959 } .line { stroke: #595959; fill: none }
  .target { fill: #d6e4f5; stroke: #0072b2 } .drafter { fill: #fbe3d3; stroke: #d55e00 }
  .good { fill: #cfeadf; stroke: #009e73 } .bad { fill: #f3d3e4; stroke: #b0467f }
  .blank { fill: #f0f0f0; stroke: #8a8a8a }
  .bar { fill: #0072b2 } .bar2 { fill: #d55e00 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #1f2129 } .ink { fill: #f0f0f0 } .soft { fill: #b8b8b8 } .line { stroke: #b8b8b8 }
    .target { fill: #123a57; stroke: #56b4e9 } .drafter { fill: #57300f; stroke: #e69f00 }
    .good { fill: #0f4536; stroke: #33c799 } .bad { fill: #55203d; stroke: #e58bbd }
    .blank { fill: #33353d; stroke: #8a8a8a }
    .bar { fill: #56b4e9 } .bar2 { fill: #e69f00 }
  }
"""


class Drawing:
    """An SVG of `width` x `height` units, made of boxes, texts and lines."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str, text: str = "") -> None:
        """A box of class `kind` with centred lines of text."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>')
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 4.5 + 17 * (i - (len(lines) - 1) / 2), line, anchor="middle")

    def text(self, x: float, y: float, text: str, *, kind: str = "ink", anchor: str = "start") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str = "bar") -> None:
        """A bar of class `kind` that stands on y."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y - height:g}" width="{width:g}" height="{height:g}"/>')

    def line(self, *points: tuple[float, float], arrow: bool = True) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        head = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(f'<polyline class="line" points="{path}"{head}/>')

    def save(self, path: Path) -> None:
        width, height = self.size
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path class="soft" d="M0,0 L8,4 L0,8 z"/></marker>'
        )
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="sans-serif" font-size="14"><title>{self.title}</title>'
            f"<style>{STYLE}</style><defs>{head}</defs>"
            f'<rect class="paper" width="{width}" height="{height}" rx="8"/>' + "\n".join(self.parts) + "</svg>\n",
            encoding="utf-8",
        )


def round_() -> Drawing:
    made = Drawing(720, 330, "A round: draft, schedule, score, verify, commit")
    steps = [
        ("1 draft", "drafter"),
        ("2 schedule", "blank"),
        ("3 score", "target"),
        ("4 verify", "good"),
        ("5 commit", "blank"),
    ]
    for i, (text, kind) in enumerate(steps):
        made.box(20 + 140 * i, 20, 115, 36, kind, text)
        if i:
            made.line((-4 + 140 * i + 0, 38), (18 + 140 * i, 38))
    rows = [
        ("drafter proposes", ["is", "a", "river", "in", "Rome"], ["drafter"] * 5),
        ("schedule keeps 4", ["is", "a", "river", "in", ""], ["drafter"] * 4 + ["blank"]),
        ("target's tokens", ["is", "a", "river", "of", ""], ["target"] * 4 + ["blank"]),
        ("committed", ["is", "a", "river", "of", ""], ["good"] * 3 + ["bad", "blank"]),
    ]
    for j, (label, words, kinds) in enumerate(rows):
        made.text(20, 107 + 52 * j, label)
        made.box(165, 84 + 52 * j, 90, 36, "target", "The Po")
        for i, (word, kind) in enumerate(zip(words, kinds, strict=True)):
            made.box(263 + 88 * i, 84 + 52 * j, 80, 36, kind, word)
    made.text(20, 306, "Three drafts accepted, one replaced: four tokens from one forward of the target.", kind="soft")
    return made


def injection() -> Drawing:
    made = Drawing(720, 300, "KV injection: hidden states of the target as keys and values of the drafter")
    made.text(20, 30, "target, one forward over committed tokens")
    for i, layer in enumerate(("layer 28", "layer 15", "layer 2")):
        made.box(20, 45 + 55 * i, 240, 40, "target", layer)
        made.line((260, 65 + 55 * i), (330, 120))
    made.box(332, 95, 120, 50, "blank", "concatenate,\nproject, norm")
    made.line((452, 120), (500, 80))
    made.line((452, 120), (500, 140))
    made.text(500, 30, "each draft layer")
    made.box(502, 60, 90, 40, "drafter", "K context")
    made.box(502, 120, 90, 40, "drafter", "V context")
    made.box(605, 60, 95, 40, "drafter", "K block")
    made.box(605, 120, 95, 40, "drafter", "V block")
    for i, word in enumerate(("anchor", "mask", "mask", "mask")):
        made.box(332 + 94 * i, 215, 86, 36, "drafter", word)
    made.line((560, 213), (600, 164))
    made.text(20, 233, "one pass over the block:")
    made.text(
        20, 280, "The queries are the block's rows. The context costs the drafter no forward of its own.", kind="soft"
    )
    return made


def mask() -> Drawing:
    made = Drawing(720, 330, "The block mask of training: rows see context before their anchor and their own block")
    for i in range(8):
        made.text(222 + 30 * i, 40, str(i), anchor="middle")
    made.text(325, 18, "context positions", anchor="middle")
    made.text(585, 18, "block rows", anchor="middle")
    for n, anchor in enumerate((3, 6)):
        for k in range(4):
            y = 52 + 124 * n + 29 * k
            made.text(20, y + 18, f"block {n + 1}, row {k} (position {anchor + k})")
            for i in range(8):
                made.box(209 + 30 * i, y, 26, 26, "good" if i < anchor else "blank")
            for m in range(2):
                for j in range(4):
                    made.box(465 + 124 * m + 29 * j, y, 26, 26, "good" if m == n else "blank")
    made.text(
        20,
        318,
        "Green is seen. Anchors at 3 and 6; no row sees the anchor's position or later in the context.",
        kind="soft",
    )
    return made


def chain() -> Drawing:
    made = Drawing(720, 260, "The sampling chain: parallel base logits, and a bias from the token before")
    for i in range(4):
        x = 150 + 140 * i
        made.box(x, 20, 110, 40, "drafter", f"base logits {i + 1}")
        made.box(x, 100, 110, 40, "blank", f"p{i + 1} = softmax")
        made.box(x, 180, 110, 40, "good", f"token {i + 1}")
        made.line((x + 55, 60), (x + 55, 98))
        made.line((x + 55, 140), (x + 55, 178))
        made.line((x - 30, 200), (x - 15, 200), (x - 15, 120), (x - 2, 120)) if i else made.line(
            (112, 200), (130, 200), (130, 120), (148, 120)
        )
    made.box(15, 180, 95, 40, "target", "anchor")
    made.text(15, 45, "one pass", kind="soft")
    made.text(15, 125, "in order", kind="soft")
    made.text(
        15,
        248,
        "The bias of the token before is a product of two small matrices: the pass is not repeated.",
        kind="soft",
    )
    return made


def survival() -> Drawing:
    made = Drawing(720, 300, "Confidence and survival by draft position")
    confidences, product = (0.9, 0.8, 0.85, 0.6, 0.7, 0.5), 1.0
    made.line((60, 240), (700, 240), arrow=False)
    for i, confidence in enumerate(confidences):
        product *= confidence
        x = 80 + 104 * i
        for j, (value, kind) in enumerate(((confidence, "bar"), (product, "bar2"))):
            made.bar(x + 40 * j, 240, 34, 180 * value, kind)
            made.text(x + 17 + 40 * j, 234 - 180 * value, f"{value:.2f}", anchor="middle")
        made.text(x + 37, 260, f"draft {i + 1}", anchor="middle")
    made.bar(80, 28, 14, 14)
    made.bar(350, 28, 14, 14, "bar2")
    made.text(100, 26, "confidence: if all before are accepted")
    made.text(370, 26, "survival: this and all before are accepted")
    made.text(
        60,
        288,
        "An example. Survival never rises along a draft, so drafts of all requests can be put in one order.",
        kind="soft",
    )
    return made


def admission() -> Drawing:
    made = Drawing(720, 330, "Algorithm 1: drafts are admitted in order of survival while throughput rises")
    seconds = [1.0, 1.02, 1.04, 1.06, 1.45, 1.47, 1.49, 1.51, 1.53]
    gains = [2.0]
    for value in (0.9, 0.85, 0.72, 0.61, 0.6, 0.58, 0.55, 0.5):
        gains.append(gains[-1] + value)
    rates = [gain / second for gain, second in zip(gains, seconds, strict=True)]
    points = [(90 + 72 * i, 320 - 55 * rate) for i, rate in enumerate(rates)]
    made.line((70, 280), (700, 280), arrow=False)
    made.line(*points, arrow=False)
    for i, (x, y) in enumerate(points):
        kind = "good" if i <= 3 else "bad" if i == 4 else "blank"
        made.box(x - 9, y - 9, 18, 18, kind)
        made.text(x, y - 16, f"{rates[i]:.2f}", anchor="middle")
        made.text(x, 298, str(i), anchor="middle")
    made.text(20, 24, "expected tokens per second, by drafts admitted (two requests; an example)")
    made.text(
        20,
        320,
        "The step costs more from draft 4 on. Algorithm 1 stops before it, although more drafts would pay again.",
        kind="soft",
    )
    return made


def lossless() -> Drawing:
    made = Drawing(720, 310, "Accept with min(1, p_t / p_d), else draw from the residual: the sum is p_t")
    tokens, drafted, target = "abcd", (0.5, 0.3, 0.1, 0.1), (0.3, 0.2, 0.4, 0.1)
    panels = (
        ("drafter, p_d", drafted),
        ("target, p_t", target),
        ("accepted: min", None),
        ("residual: max(0, p_t - p_d)", None),
    )
    for j, (title, given) in enumerate(panels):
        x0 = 25 + 175 * j
        values = given or [min(d, t) if j == 2 else max(0.0, t - d) for d, t in zip(drafted, target, strict=True)]
        made.text(x0 - 5, 30, title)
        made.line((x0, 240), (x0 + 150, 240), arrow=False)
        for i, value in enumerate(values):
            kind = "bar2" if j == 0 else "bar"
            made.bar(x0 + 6 + 37 * i, 240, 28, 340 * value, kind)
            made.text(x0 + 20 + 37 * i, 234 - 340 * value, f"{value:.1f}", anchor="middle")
            made.text(x0 + 20 + 37 * i, 258, tokens[i], anchor="middle")
    made.text(
        20,
        292,
        "The last two panels add up to the target's. So the output is the target's, whatever the drafter.",
        kind="soft",
    )
    return made


DRAWINGS = {
    "round": round_, "injection": injection, "mask": mask, "chain": chain, "survival": survival, "admission": admission,
    "lossless": lossless,
}  # fmt: skip

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        draw().save(Path(sys.argv[1]) / f"{name}.svg")
